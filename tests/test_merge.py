"""Merging: the merged model computes what base and adapter compute; sums of adapters are sums."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import model_files
import numpy as np
import pytest
import safetensors.numpy
import test_artefact
import tiny

from purelora import adapters as adapters_command
from purelora import arithmetic, artefact, errors, merge, quant
from purelora import tree as trees
from purelora.io import builtin, peft
from purelora.io import load as weights
from purelora.models import causal_lm

FEATURES = test_artefact.FEATURES | test_artefact.UNTIED


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles():
    with tiny.quick_compiles():
        yield


class Base:
    """The tiny built-in model as files, tied or not, with what it computes."""

    def __init__(self, folder: pathlib.Path, tied: bool):
        self.path = folder / ("tied" if tied else "untied")
        made = builtin.tiny()
        config = dict(made.source.config) | {
            "tie_word_embeddings": tied,
            "attention_bias": True,
            "mlp_bias": True,
        }
        self.model = causal_lm.from_hf(config, "config.json", dtype="float32")
        self.path.mkdir()
        rng = np.random.default_rng(1)
        arrays = {}
        for path, names in self.model.hf_names.items():
            info = self.model.flat_infos[path]
            shape = info.shape[1:] if len(names) > 1 else info.shape
            shape = shape[::-1] if info.contracting == -2 else shape
            arrays |= {n: rng.normal(0, 0.2, shape).astype(np.float32) for n in names}
        safetensors.numpy.save_file(arrays, self.path / "model.safetensors")
        (self.path / "config.json").write_text(json.dumps(config))
        made.tokenizer.backend.save(str(self.path / "tokenizer.json"))

    def adapter(self, folder: pathlib.Path, name: str, **changes: Any) -> str:
        """A PEFT folder of an adapter with a feature."""
        settings = tiny.lora_config(**FEATURES[name] | changes)
        m = self.model.adapted(settings)
        leaves = test_artefact.trained(m, loaded(str(self.path))[1])
        known = artefact.record(m, settings, str(self.path))
        adapter = artefact.unrolled(leaves, known, path="run", base_fingerprint=None)
        peft.write(str(folder), adapter)
        return str(folder)


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[bool, Base]:
    folder = tmp_path_factory.mktemp("bases")
    return {tied: Base(folder, tied) for tied in (True, False)}


def loaded(path: str) -> tuple[causal_lm.CausalLM, trees.Tree]:
    opened = builtin.open_model(path)
    model = causal_lm.from_hf(opened.source.config, path, dtype="float32")
    placed = jax.tree.map(lambda _: jax.devices()[0], model.infos)
    placed = jax.tree.map(jax.sharding.SingleDeviceSharding, placed)
    return model, weights.load(opened.source, model, model.infos, placed).tree


def logits(model: causal_lm.CausalLM, trainable: trees.Tree, base: trees.Tree) -> np.ndarray:
    ids = np.random.default_rng(2).integers(0, 259, (2, 7))
    kept = {p: leaf for p, leaf in trees.flatten(base).items() if p not in model.adaptation.full}
    run = jax.jit(lambda t, b: model.logits(t, b, tiny.inputs(ids)))
    return np.asarray(run(trainable, trees.unflatten(kept)))


def adapted_logits(base: Base, adapter: str) -> np.ndarray:
    model, tree = loaded(str(base.path))
    found = artefact.attach(artefact.open_adapter(adapter), model, base_fingerprint=None)
    return logits(found.model, found.trainable, tree)


@pytest.mark.parametrize(("name", "tied"), test_artefact.CASES)
def test_merged_is_adapted(bases, tmp_path, name, tied, capsys):
    base = bases[tied]
    adapter = base.adapter(tmp_path / "adapter", name)
    out = tmp_path / "merged"
    assert merge.main([f"--adapter={adapter}", f"--output={out}", "--shard-bytes=60000"]) == 0
    assert (out / "model.safetensors.index.json").exists()
    merged = loaded(str(out))
    want = adapted_logits(base, adapter)
    scale = np.abs(want).max()
    np.testing.assert_allclose(logits(merged[0], {}, merged[1]), want, rtol=0, atol=2e-5 * scale)
    assert np.abs(want - logits(*(base.model, {}, loaded(str(base.path))[1]))).max() > 1e-2
    untied = tied and name in ("head", "embedding", "dora")
    assert merged[0].is_tied == (tied and not untied)
    rows = json.loads((out / merge.REPORT).read_text())
    assert all(row["kept"] > 0.999 for row in rows)


def test_report_says_what_a_narrow_dtype_keeps(bases, tmp_path, capsys):
    """An update of a hundredth of bfloat16's step is all rounding."""
    base = bases[False]
    small = {"target_modules": ("q_proj",), "lora_alpha": 4e-5}
    adapter = base.adapter(tmp_path / "adapter", "plain", **small)
    out = tmp_path / "merged"
    arguments = [f"--adapter={adapter}", f"--output={out}", "--dtype=bfloat16"]
    assert merge.main(arguments) == 0
    assert "more than half of the update is rounding" in capsys.readouterr().out
    rows = json.loads((out / merge.REPORT).read_text())
    name = rows[0]["module"]
    found = artefact.open_adapter(adapter).modules[name]
    own = safetensors.numpy.load_file(base.path / "model.safetensors")[f"{name}.weight"]
    delta = np.float32(1e-5) * (found["lora_B"] @ found["lora_A"])
    to_bf16 = lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16).astype(jnp.float32))  # noqa: E731
    change = to_bf16(own + delta) - to_bf16(own)
    np.testing.assert_allclose(rows[0]["kept"], (change * delta).sum() / (delta**2).sum(), 1e-2)
    np.testing.assert_allclose(
        rows[0]["error"], np.linalg.norm(change - delta) / np.linalg.norm(delta), 1e-2
    )


@pytest.mark.parametrize("qtype", ["int8", "nf4"])
def test_onto_the_dequantised_base(bases, tmp_path, qtype):
    """What training saw: base quantised, adapter on top."""
    base = bases[True]
    adapter = base.adapter(tmp_path / "adapter", "plain")
    out = tmp_path / "merged"
    options = ["--onto=dequantised", f"--qtype={qtype}", "--tile-size=16", "--skip=embed_tokens"]
    assert merge.main([f"--adapter={adapter}", f"--output={out}", *options]) == 0
    model, tree = loaded(str(base.path))
    infos = quant.quantised_infos(model.infos, qtype=qtype, tile_size=16, skip=("embed_tokens",))
    rounded = trees.map_leaves(
        lambda w, like: w if not hasattr(like, "qvalue") else quant.quantise(w, like), tree, infos
    )
    found = artefact.attach(artefact.open_adapter(adapter), model, base_fingerprint=None)
    want = logits(found.model, found.trainable, rounded)
    got = logits(model, {}, loaded(str(out))[1])
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5 * np.abs(want).max())
    plain = adapted_logits(base, adapter)
    assert np.abs(want - plain).max() > 1e-3 * np.abs(plain).max()


def deltas(base: Base, adapter: peft.Adapter) -> dict[str, np.ndarray]:
    own = safetensors.numpy.load_file(base.path / "model.safetensors")
    zero = {name: np.zeros_like(own[f"{name}.weight"]) for name in adapter.modules}
    return {n: arithmetic.updated(adapter, n, "weight", z) for n, z in zero.items()}


OPERATIONS = {
    "add": ([], (1.0, 1.0)),
    "average": ([], (0.5, 0.5)),
    "interpolate": (["--t=0.25"], (0.75, 0.25)),
    "concatenate": (["--weight=2", "--weight=-0.5"], (2.0, -0.5)),
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_sums_of_adapters_are_sums_of_updates(bases, tmp_path, op):
    """With other ranks, scalings and targets in the two."""
    base, (extra, (w1, w2)) = bases[False], OPERATIONS[op]
    one = base.adapter(tmp_path / "one", "rank_pattern")
    two = base.adapter(tmp_path / "two", "rslora", target_modules=("q_proj", "lm_head", "o_proj"))
    out = str(tmp_path / "sum")
    arguments = [f"--op={op}", f"--adapter={one}", f"--adapter={two}", f"--output={out}", *extra]
    assert adapters_command.main(arguments) == 0
    first, second, got = (deltas(base, artefact.open_adapter(p)) for p in (one, two, out))
    assert got.keys() == first.keys() | second.keys()
    for name, delta in got.items():
        want = w1 * first.get(name, 0) + w2 * second.get(name, 0)
        np.testing.assert_allclose(delta, want, rtol=0, atol=1e-5, err_msg=name)


def test_scale_keeps_the_rank_and_truncation_is_the_nearest(bases, tmp_path):
    base = bases[False]
    one = base.adapter(tmp_path / "one", "rank_pattern")
    scaled, small = str(tmp_path / "scaled"), str(tmp_path / "small")
    options = [f"--adapter={one}", "--factor=-3", f"--output={scaled}"]
    assert adapters_command.main(["--op=scale", *options]) == 0
    options = [f"--adapter={one}", "--r=2", f"--output={small}"]
    assert adapters_command.main(["--op=truncate", *options]) == 0
    before, three, two = (artefact.open_adapter(path) for path in (one, scaled, small))
    assert three.config.rank_pattern == before.config.rank_pattern
    wide, times, low = (deltas(base, adapter) for adapter in (before, three, two))
    for name, delta in wide.items():
        np.testing.assert_allclose(times[name], -3 * delta, rtol=1e-5, atol=1e-5)
        u, s, vh = np.linalg.svd(delta.astype(np.float64), full_matrices=False)
        want = (u[:, :2] * s[:2]) @ vh[:2]
        np.testing.assert_allclose(low[name], want, rtol=0, atol=1e-5)
        assert two.modules[name]["lora_A"].shape[0] == 2


@pytest.mark.parametrize("name", ["dora", "norms", "tokens", "own biases"])
def test_sums_refuse_what_is_no_linear_update(bases, tmp_path, name):
    adapter = bases[False].adapter(tmp_path / "one", name)
    arguments = ["--op=scale", "--factor=2", f"--adapter={adapter}", f"--output={tmp_path / 'o'}"]
    with pytest.raises(errors.ModelError, match="no linear update of a weight"):
        adapters_command.main(arguments)
    assert not (tmp_path / "o").exists()


def test_merging_refuses_another_base(bases, tmp_path):
    base = bases[False]
    path = base.adapter(tmp_path / "one", "plain")
    adapter = artefact.open_adapter(path)
    peft.write(
        str(tmp_path / "marked"), peft.Adapter("x", adapter.config, adapter.modules, "a" * 64)
    )
    arguments = [f"--adapter={tmp_path / 'marked'}", f"--output={tmp_path / 'out'}"]
    with pytest.raises(errors.ModelError, match="was trained on another base"):
        merge.main(arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "q8_0"])
def test_gguf_output_and_its_report(tmp_path, dtype):
    """Vectors stay float32; the report speaks of the element type of the file."""
    model_files.write_tiny_gguf(tmp_path / "base.gguf")
    model, tree = loaded(str(tmp_path / "base.gguf"))
    settings = tiny.lora_config(target_modules=("q_proj",), modules_to_save=("norm",))
    m = model.adapted(settings)
    leaves = test_artefact.trained(m, tree)
    known = artefact.record(m, settings, str(tmp_path / "base.gguf"))
    adapter = artefact.unrolled(leaves, known, path="run", base_fingerprint=None)
    peft.write(str(tmp_path / "adapter"), adapter)
    out = tmp_path / "merged.gguf"
    options = [f"--adapter={tmp_path / 'adapter'}", f"--output={out}", f"--dtype={dtype}"]
    form = merge.output_form(merge.Options(output=str(out), dtype=dtype), {})
    assert merge.main(options) == 0
    merged = trees.flatten(loaded(str(out))[1])
    want = trees.flatten(tree)
    a, b = (leaves[f"layers.self_attn.q_proj.{n}"] for n in ("lora_a", "lora_b"))
    exact = np.asarray(want["layers.self_attn.q_proj.weight"]) + 2 * (a @ b)
    found = np.asarray(merged["layers.self_attn.q_proj.weight"])
    bound = {"float32": 1e-6, "bfloat16": 2**-8, "q8_0": 2**-7}[dtype] * np.abs(exact).max()
    np.testing.assert_allclose(found, exact, rtol=0, atol=bound)
    np.testing.assert_array_equal(merged["norm.weight"], leaves["norm.weight"])
    rounded = form.rounded(exact[0].T.astype(np.float32))
    assert (dtype == "float32") == np.array_equal(rounded, exact[0].T.astype(np.float32))
