"""Merging: the merged model computes what base and adapter compute; sums of adapters are sums."""

import dataclasses
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from purelora.commands import adapters as adapters_command
from purelora.commands import merge
from purelora.core import errors, trees
from purelora.interop import builtin, merged_model
from purelora.interop.peft import adapter_sources, algebra, artefact, attach, record, unroll
from purelora.interop.peft import files as peft_files
from purelora.models import causal_lm
from purelora.ops import quant
from tests.support import model_files, tiny, trained_adapters
from tests.support.loaded_models import loaded, logits

FEATURES = trained_adapters.FEATURES | trained_adapters.UNTIED


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
        leaves = trained_adapters.trained(m, loaded(str(self.path))[1])
        known = record.of_model(m, settings, str(self.path))
        adapter = unroll.unrolled(leaves, known, path="run", base_fingerprint=None)
        peft_files.write(str(folder), adapter)
        return str(folder)


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[bool, Base]:
    folder = tmp_path_factory.mktemp("bases")
    return {tied: Base(folder, tied) for tied in (True, False)}


def adapted_logits(base: Base, adapter: str) -> np.ndarray:
    model, tree = loaded(str(base.path))
    found = attach.attach(adapter_sources.open_adapter(adapter), model, base_fingerprint=None)
    return logits(found.model, found.trainable, tree)


# Tied and untied tables differ in what is merged into the head, which two of these show; and
# `rank_pattern` and `some layers` have all that two others have.
OTHERS = "plain", "layers_to_transform"
QUICK = [
    pytest.param(
        name,
        tied,
        marks=[pytest.mark.slow] if name in OTHERS or (tied and "head" not in name) else [],
    )
    for name, tied in trained_adapters.CASES
]


@pytest.mark.parametrize(("name", "tied"), QUICK)
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
    untied = tied and name in ("head", "embedding", "dora", "loha", "tokens and head")
    assert merged[0].is_tied == (tied and not untied)
    rows = json.loads((out / "merge_report.json").read_text())
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
    rows = json.loads((out / "merge_report.json").read_text())
    name = rows[0]["module"]
    found = adapter_sources.open_adapter(adapter).modules[name]
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
    found = attach.attach(adapter_sources.open_adapter(adapter), model, base_fingerprint=None)
    want = logits(found.model, found.trainable, rounded)
    got = logits(model, {}, loaded(str(out))[1])
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5 * np.abs(want).max())
    plain = adapted_logits(base, adapter)
    assert np.abs(want - plain).max() > 1e-3 * np.abs(plain).max()


def deltas(base: Base, adapter: artefact.Adapter) -> dict[str, np.ndarray]:
    own = safetensors.numpy.load_file(base.path / "model.safetensors")
    zero = {name: np.zeros_like(own[f"{name}.weight"]) for name in adapter.modules}
    return {n: algebra.updated(adapter, n, "weight", z) for n, z in zero.items()}


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
    first, second, got = (deltas(base, adapter_sources.open_adapter(p)) for p in (one, two, out))
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
    before, three, two = (adapter_sources.open_adapter(path) for path in (one, scaled, small))
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
    adapter = adapter_sources.open_adapter(path)
    peft_files.write(
        str(tmp_path / "marked"), artefact.Adapter("x", adapter.config, adapter.modules, "a" * 64)
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
    leaves = trained_adapters.trained(m, tree)
    known = record.of_model(m, settings, str(tmp_path / "base.gguf"))
    adapter = unroll.unrolled(leaves, known, path="run", base_fingerprint=None)
    peft_files.write(str(tmp_path / "adapter"), adapter)
    out = tmp_path / "merged.gguf"
    options = [f"--adapter={tmp_path / 'adapter'}", f"--output={out}", f"--dtype={dtype}"]
    form = merged_model.output_form(dtype, {}, is_gguf=True)
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


ADAPTER, OUT = "--adapter=nonsuch", "--output=nonsuch/out"
ONTO = "--onto=dequantised"


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([], [r"^--adapter, --model: are both missing"]),
        ([ADAPTER, ONTO, "--qtype=int8", "--tile-size=0"], [r"--tile-size = 0: must be at least"]),
        ([ADAPTER, ONTO, "--qtype=int8", "--skip=("], [r"--skip = '\(': is not a regular expr"]),
        (
            [ADAPTER, "--qtype=int4", "--tile-size=7", "--skip=x"],
            [rf"--{name} = .*: has no effect with --onto=original; set --onto=dequantised, or leave"
             for name in ("qtype", "tile-size", "skip")],
        ),
        ([ADAPTER, ONTO, "--tile-size=8"], [r"--tile-size = 8: has no effect without --qtype"]),
        ([ADAPTER, ADAPTER, ONTO], [r"--qtype: is missing: there is not one run"]),
        ([ADAPTER, "--shard-bytes=0"], [r"--shard-bytes = 0: must be at least 1"]),
        ([ADAPTER, "--shard-bytes=-1"], [r"--shard-bytes = -1: must be at least 1"]),
        ([ADAPTER, "--dtype=q8_0"], [r"--dtype = 'q8_0': is a type of GGUF only"]),
        (
            [ADAPTER, "--weight=x", "--weight=nan", "--shard-bytes=0", "--onto=original"],
            [r"--weight = \['x', 'nan'\]: is given 2 times for 1 adapters",
             r"--weight = 'x': is not a finite", r"--weight = 'nan': is not", r"--shard-bytes = 0"],
        ),
        ([ADAPTER, "--op=x"], [r"--op: is not an argument"]),
    ],
)  # fmt: skip
def test_wrong_arguments_of_merge_are_one_error_before_anything_is_read(arguments, messages):
    with pytest.raises(errors.ConfigError, match=messages[0]) as caught:
        merge.main([OUT, *arguments])
    assert len(caught.value.problems) == len(messages)
    for message in messages:
        with pytest.raises(errors.ConfigError, match=message):
            raise caught.value


def test_shards_of_a_gguf_file_are_refused():
    with pytest.raises(errors.ConfigError, match=r"^--shard-bytes = 9: has no effect on a .gguf"):
        merge.main([ADAPTER, "--output=nonsuch.gguf", "--shard-bytes=9"])


def test_merge_says_first_that_its_output_is_taken(tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(errors.ModelError, match="taken: exists, and nothing is overwritten"):
        merge.main([ADAPTER, f"--output={tmp_path / 'taken'}"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--skip=nonsense"], r"^--skip = 'nonsense': names no weight of this model; it has embed"),
        (["--tile-size=7"], r"^--tile-size = 7: layers.*: does not divide"),
        (["--qtype=nf4", "--tile-size=2"], r"^--tile-size = 2: layers.*nf4 keeps two codes"),
    ],
)
def test_quantisations_that_do_not_fit_name_their_argument(bases, tmp_path, options, message):
    adapter = bases[True].adapter(tmp_path / "adapter", "plain")
    qtype = [] if options[0].startswith("--qtype") else ["--qtype=int8"]
    arguments = [f"--adapter={adapter}", f"--output={tmp_path / 'out'}", ONTO, *qtype, *options]
    with pytest.raises(errors.ConfigError, match=message):
        merge.main(arguments)


def test_by_default_the_embedding_is_not_quantised_as_in_training(bases, tmp_path):
    adapter = bases[True].adapter(tmp_path / "adapter", "plain")
    tables = {}
    for name, options in (
        ("default", []),
        ("named", ["--skip=embed_tokens"]),
        ("none", ["--skip="]),
    ):
        out = tmp_path / name
        arguments = [f"--adapter={adapter}", f"--output={out}", ONTO, "--qtype=int8", *options]
        assert merge.main(arguments) == 0
        read = safetensors.numpy.load_file(out / "model.safetensors")
        tables[name] = read["model.embed_tokens.weight"]
    own = safetensors.numpy.load_file(bases[True].path / "model.safetensors")
    np.testing.assert_array_equal(tables["default"], own["model.embed_tokens.weight"])
    np.testing.assert_array_equal(tables["default"], tables["named"])
    assert not np.array_equal(tables["none"], tables["default"])


def with_copy(
    base: Base, folder: pathlib.Path, name: str, change: float, copied: str = "lm_head"
) -> str:
    """An adapter with a copy of a weight of the base beside it, as PEFT stores it."""
    adapter = adapter_sources.open_adapter(base.adapter(folder / f"{name} bare", "head"))
    own = safetensors.numpy.load_file(base.path / "model.safetensors")[f"{copied}.weight"]
    own[3, 2] += change
    modules = {**adapter.modules, copied: {**adapter.modules[copied], "base_weight": own}}
    peft_files.write(str(folder / name), dataclasses.replace(adapter, modules=modules))
    return str(folder / name)


def test_merge_compares_copies_of_the_base_with_the_base(bases, tmp_path):
    same, other = (with_copy(bases[False], tmp_path, n, c) for n, c in (("a", 0), ("b", 0.01)))
    assert merge.main([f"--adapter={same}", f"--output={tmp_path / 'out'}"]) == 0
    with pytest.raises(errors.ModelError, match=r"lm_head.weight: holds a copy of this weight"):
        merge.main([f"--adapter={other}", f"--output={tmp_path / 'other'}"])
    assert not (tmp_path / "other").exists()


def test_a_tensor_that_is_made_twice_is_reported_once(bases, tmp_path):
    base = bases[False]
    adapter = adapter_sources.open_adapter(base.adapter(tmp_path / "a", "plain"))
    opened = builtin.open_model(str(base.path))
    form = merged_model.output_form(None, opened.source.config, is_gguf=False)
    merged = merged_model.MergedModel(
        opened.source, base.model, [(adapter, 1.0)], lambda name, values: values, form
    )
    name = next(iter(adapter.modules))
    spec = merged.tensors()[f"{name}.weight"]
    spec.load(), spec.load()
    assert [survival.module for survival in merged.survivals] == [name]


# ---- sums of adapters that do not go together --------------------------------------------------


def resized(path: str, folder: pathlib.Path, module: str, columns: int) -> str:
    """The adapter with another number of inputs of one module."""
    adapter = adapter_sources.open_adapter(path)
    kinds = dict(adapter.modules[module])
    kinds["lora_A"] = np.zeros((kinds["lora_A"].shape[0], columns), np.float32)
    peft_files.write(
        str(folder), dataclasses.replace(adapter, modules={**adapter.modules, module: kinds})
    )
    return str(folder)


def summed(*paths: str, out: pathlib.Path, extra: tuple[str, ...] = ()) -> artefact.Adapter:
    adapters = [f"--adapter={path}" for path in paths]
    assert adapters_command.main(["--op=add", *adapters, f"--output={out}", *extra]) == 0
    return adapter_sources.open_adapter(str(out))


def test_sums_of_other_sizes_are_refused_by_module_and_shapes(bases, tmp_path):
    one = bases[False].adapter(tmp_path / "one", "plain")
    module = "model.layers.0.self_attn.q_proj"
    two = resized(one, tmp_path / "two", module, 48)
    message = (
        rf"two: {module}: adapts a linear layer of \[64, 48\], but in .*one it is .*\[64, 64\]"
    )
    with pytest.raises(errors.ModelError, match=message):
        summed(one, two, out=tmp_path / "sum")


def stating(path: str, folder: pathlib.Path, fingerprint: str | None) -> str:
    adapter = adapter_sources.open_adapter(path)
    peft_files.write(str(folder), dataclasses.replace(adapter, base_fingerprint=fingerprint))
    return str(folder)


def test_a_sum_states_a_base_only_if_all_do(bases, tmp_path, capsys):
    plain = bases[False].adapter(tmp_path / "plain", "plain")
    known = stating(plain, tmp_path / "known", "a" * 64)
    assert summed(known, known, out=tmp_path / "both").base_fingerprint == "a" * 64
    assert "states no base" not in capsys.readouterr().out
    assert summed(known, plain, out=tmp_path / "one").base_fingerprint is None
    said = capsys.readouterr().out
    assert f"one: states no base, because {plain} states none" in said
    # What was found when the adapters were opened.
    assert f"{plain}: it does not say which base it belongs to" in said


def test_copies_of_the_base_are_kept_by_every_operation(bases, tmp_path):
    base = bases[False]
    same, twin, other = (
        with_copy(base, tmp_path, n, c) for n, c in (("a", 0), ("b", 0), ("c", 0.01))
    )
    bare = str(tmp_path / "a bare")
    want = adapter_sources.open_adapter(same).modules["lm_head"]["base_weight"]
    outs = [
        summed(same, twin, out=tmp_path / "sum"),
        summed(bare, same, out=tmp_path / "with bare"),
        summed(same, twin, out=tmp_path / "small", extra=("--r=2",)),
    ]
    for op in (["--op=scale", "--factor=2"], ["--op=truncate", "--r=2"]):
        out = str(tmp_path / op[0])
        assert adapters_command.main([*op, f"--adapter={same}", f"--output={out}"]) == 0
        outs.append(adapter_sources.open_adapter(out))
    for out in outs:
        np.testing.assert_array_equal(out.modules["lm_head"]["base_weight"], want)
    message = r"c: lm_head: holds a copy of the base's weight that is not that of .*a"
    with pytest.raises(errors.ModelError, match=message):
        summed(same, other, out=tmp_path / "wrong")


def test_weights_of_sums_are_numbers(tmp_path):
    adapters = ["--adapter=a", "--adapter=b", f"--output={tmp_path / 'o'}"]
    with pytest.raises(errors.ConfigError) as caught:
        adapters_command.main(["--op=concatenate", *adapters, "--weight=x", "--weight=inf"])
    assert [problem.value for problem in caught.value.problems] == ["x", "inf"]
