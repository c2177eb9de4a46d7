"""Adapters on experts in PEFT's files: bit for bit out and in, of every layout, and refused."""

import dataclasses
import json
import pathlib
from typing import Any

import chex
import numpy as np
import pytest
import safetensors.numpy

from purelora.commands import merge
from purelora.core import errors, trees
from purelora.interop.peft import (
    adapter_config,
    adapter_sources,
    algebra,
    artefact,
    attach,
    config_keys,
    record,
    unroll,
)
from purelora.interop.peft import files as peft_files
from purelora.lora import targets
from purelora.models import causal_lm
from tests.support import expert_files, loaded_models, model_files, tiny
from tests.support import peft_folders as pf
from tests.support.expert_adapters import EXPERTS, lora_masked

FAMILY, VOCAB = "qwen3_moe", 259
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear"},
    "experts": {"target_modules": "experts", "use_rslora": True, "r": 3},
    "gate": {"target_modules": ("gate_proj",)},
    "up": {"target_parameters": ("experts.gate_up_proj",), "target_modules": (),
           "exclude_modules": ("gate_proj",)},
    "router": {"target_modules": ("down_proj", "gate", "k_proj")},
    "layers": {
        "target_modules": ("gate_proj", "up_proj", "down_proj", "v_proj"),
        "layers_to_transform": (1,),
        "rank_pattern": {"up_proj": 2, "experts.down_proj": 3, "v_proj": 1},
        "alpha_pattern": {"up_proj": 4.0},
    },
}  # fmt: skip


def adapted(name: str, seed: int = 9) -> tuple[causal_lm.CausalLM, Any, artefact.Adapter]:
    """A model, its adapters as if trained, and these as an artefact."""
    settings = tiny.lora_config(**SETTINGS[name])
    m = tiny.model(FAMILY, **SIZES).adapted(settings)
    leaves = lora_masked(tiny.noisy(tiny.adapters(m, fresh=True), seed=seed), m)
    host = {path: np.asarray(leaf) for path, leaf in trees.flatten(leaves).items()}
    known = record.from_json(json.loads(json.dumps(record.of_model(m, settings, "base").to_json())))
    return m, host, unroll.unrolled(host, known, path="run", base_fingerprint="f" * 64)


@pytest.mark.parametrize("name", SETTINGS)
def test_out_and_in_changes_no_bit(name, tmp_path):
    m, host, adapter = adapted(name)
    peft_files.write(str(tmp_path / "a"), adapter)
    read = peft_files.read(str(tmp_path / "a"))
    artefact.check_equal(read, adapter)
    found = attach.attach(read, tiny.model(FAMILY, **SIZES), base_fingerprint="f" * 64)
    chex.assert_trees_all_equal(trees.flatten(found.trainable), host)
    assert not attach.differences(found.model.adaptation, m.adaptation, "a")
    # By the file's own words the parameters have the scalings of the matrices in them.
    config = json.loads((tmp_path / "a" / peft_files.CONFIG).read_text())
    own = config_keys.parse("", config).config
    for path in m.adaptation.targets.keys() & set(EXPERTS):
        target = m.adaptation.targets[path]
        for module, scaling in zip(target.names, target.scalings, strict=True):
            found_scaling = adapter_config.scaling(own, targets.parameter_name(module))
            assert found_scaling == pytest.approx(scaling, rel=1e-12)
    # What was read is written again as the same file.
    peft_files.write(str(tmp_path / "b"), read)
    one, other = (safetensors.numpy.load_file(tmp_path / f / peft_files.WEIGHTS) for f in "ab")
    chex.assert_trees_all_equal(one, other)


def test_the_files_are_those_of_peft(tmp_path):
    """Keys, shapes and config as PEFT writes them; the factors by the formula that it uses."""
    m, host, adapter = adapted("all")
    peft_files.write(str(tmp_path / "a"), adapter)
    config = json.loads((tmp_path / "a" / peft_files.CONFIG).read_text())
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert config["rank_pattern"] == {"experts.gate_up_proj": 8}
    assert config["alpha_pattern"] == {"experts.gate_up_proj": 16.0}
    tensors = safetensors.numpy.load_file(tmp_path / "a" / peft_files.WEIGHTS)
    around = "base_model.model.model.layers.1.mlp.experts"
    for key, paths, r in ((f"{around}.base_layer", EXPERTS[:2], 8), (around, EXPERTS[2:], 4)):
        a, b = (tensors[f"{key}.lora_{one}.weight"] for one in "AB")
        a, b = a.reshape(6, r, -1), b.reshape(len(b), r, 6)
        found = np.einsum("ore,eri->eio", b, a)
        factors = ((host[f"{p}.lora_a"][1], host[f"{p}.lora_b"][1]) for p in paths)
        wanted = np.concatenate([one @ other for one, other in factors], axis=2)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    assert sum(".experts" in key for key in tensors) == 2 * 2 * 2


@pytest.fixture(scope="module", params=[pytest.param("own", marks=pytest.mark.slow), "fused"])
def base(request, tmp_path_factory) -> pathlib.Path:
    """A model folder in each layout."""
    folder = tmp_path_factory.mktemp(request.param)
    m = tiny.model(FAMILY, **SIZES)
    arrays = expert_files.in_files(expert_files.stacks(m), FAMILY, request.param)
    model_files.write_hf(folder, arrays, tiny.hf_config(FAMILY, **SIZES))
    return folder


def test_merged_is_adapted(base, tmp_path, capsys):
    """In either layout; the report has one line for all experts of a layer."""
    _, host, adapter = adapted("router")
    model, weights = loaded_models.loaded(str(base))
    attached = attach.attach(adapter, model, base_fingerprint=None)
    peft_files.write(str(tmp_path / "a"), dataclasses.replace(adapter, base_fingerprint=None))
    out = tmp_path / "merged"
    arguments = [f"--adapter={tmp_path / 'a'}", f"--model={base}", f"--output={out}"]
    assert merge.main(arguments) == 0
    assert capsys.readouterr().out.count("experts.down_proj") == 2
    want = loaded_models.logits(attached.model, attached.trainable, weights)
    merged, whole = loaded_models.loaded(str(out))
    np.testing.assert_allclose(loaded_models.logits(merged, {}, whole), want, rtol=0, atol=1e-4)
    assert np.abs(want - loaded_models.logits(model, {}, weights)).max() > 1e-2
    one, other = (safetensors.numpy.load_file(f / "model.safetensors") for f in (base, out))
    changed = {name for name in one if not np.array_equal(one[name], other[name])}
    assert one.keys() == other.keys()
    assert changed == {n for n in one if "down_proj" in n or ".gate.weight" in n or "k_proj" in n}


def test_sums_and_lower_ranks_of_experts(tmp_path):
    """Of adapters on different matrices, through files."""
    m = tiny.model(FAMILY, **SIZES)
    adapters = [adapted(name, seed)[2] for name, seed in (("gate", 1), ("all", 2), ("router", 3))]
    weights = [0.5, 2.0, -1.0]
    summed = algebra.summed(adapters, weights)
    peft_files.write(str(tmp_path / "sum"), summed)
    read = peft_files.read(str(tmp_path / "sum"))
    artefact.check_equal(read, summed)
    attach.attach(read, m, base_fingerprint=None)
    low = algebra.truncated(read, 30)
    peft_files.write(str(tmp_path / "low"), low)
    low = peft_files.read(str(tmp_path / "low"))
    for path, module in m.modules.items():
        if path in ("embed_tokens", "lm_head"):
            continue
        for name in module.names:
            zero = np.zeros(module.weight.file_shape, np.float32)
            wanted = sum(
                w * algebra.updated(a, name, "weight", zero)
                for w, a in zip(weights, adapters, strict=True)
            )
            for found in (read, low):
                got = algebra.updated(found, name, "weight", zero)
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5, err_msg=name)
    few = {n: {k: a[:5] for k, a in kinds.items()} for n, kinds in adapters[0].modules.items()}
    smaller = dataclasses.replace(adapters[0], modules=few)
    message = r"adapts experts of \[5, 20, 32\], but in run it is experts of \[6, 20, 32\]"
    with pytest.raises(errors.ModelError, match=message):
        algebra.summed([adapters[0], smaller], [1, 1])


# ---- other layouts -----------------------------------------------------------------------------

R, E, D, F = 3, 5, 32, 48  # Of Mixtral.


def numbered(block: str, names: tuple[str, str, str]) -> dict[str, np.ndarray]:
    """Adapters on each expert by itself, and on the router, of two layers."""
    tensors = {}
    for i in range(2):
        for number in range(E):
            for name, (n_in, n_out) in zip(names, ((D, F), (D, F), (F, D)), strict=True):
                key = f"base_model.model.model.layers.{i}.{block}.experts.{number}.{name}"
                tensors[f"{key}.lora_A.weight"] = pf.draw(R, n_in, seed=i + 10 * number)
                tensors[f"{key}.lora_B.weight"] = pf.draw(n_out, R, seed=i + 10 * number)
        key = f"base_model.model.model.layers.{i}.{block}.gate"
        tensors[f"{key}.lora_A.weight"] = pf.draw(2, D, seed=i)
        tensors[f"{key}.lora_B.weight"] = pf.draw(E, 2, seed=i)
    return tensors


OLDER = {
    "block_sparse_moe": ("w1", "w3", "w2"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def older(folder: pathlib.Path, block: str, change=lambda tensors: None, **changes: Any) -> str:
    names = OLDER[block]
    config = {
        "peft_type": "LORA", "r": R, "lora_alpha": 6, "target_modules": [*names, "gate"],
        "rank_pattern": {"gate": 2}, "alpha_pattern": {names[2]: 12},
    } | changes  # fmt: skip
    tensors = numbered(block, names)
    change(tensors)
    return pf.write_raw(folder, config, tensors)


@pytest.mark.parametrize("block", OLDER)
def test_one_adapter_for_each_expert(block, tmp_path):
    m = tiny.model("mixtral", num_hidden_layers=2)
    path = older(tmp_path / "a", block)
    found = attach.attach(adapter_sources.open_adapter(path), m, base_fingerprint=None)
    leaves, tensors = trees.flatten(found.trainable), numbered(block, OLDER[block])
    for path_of, name in zip(EXPERTS, OLDER[block], strict=True):
        target = found.model.adaptation.targets[path_of]
        assert set(target.scalings) == {12 / R if path_of == EXPERTS[2] else 6 / R}
        for i in range(2):
            for number in range(E):
                key = f"base_model.model.model.layers.{i}.{block}.experts.{number}.{name}"
                a, b = (leaves[f"{path_of}.lora_{one}"][i, number].T for one in "ab")
                np.testing.assert_array_equal(a, tensors[f"{key}.lora_A.weight"])
                np.testing.assert_array_equal(b, tensors[f"{key}.lora_B.weight"])
    router = found.model.adaptation.targets["layers.mlp.gate"]
    assert router.ranks == (2, 2) and router.scalings == (3, 3)
    # Written as today's PEFT has it, it is the same adapter.
    peft_files.write(str(tmp_path / "b"), found.placed)
    again = attach.attach(
        adapter_sources.open_adapter(str(tmp_path / "b")), m, base_fingerprint=None
    )
    chex.assert_trees_all_equal(again.trainable, found.trainable)
    assert not attach.differences(again.model.adaptation, found.model.adaptation, "b")


def parameters(folder: pathlib.Path, change=lambda tensors: None, **changes: Any) -> str:
    """Adapters on the two parameters of one layer, as PEFT nests them."""
    key = "base_model.model.model.layers.0.mlp.experts"
    tensors = {
        f"{key}.base_layer.lora_A.weight": pf.draw(R * E, D),
        f"{key}.base_layer.lora_B.weight": pf.draw(2 * F, R * E),
        f"{key}.lora_A.weight": pf.draw(R * E, F),
        f"{key}.lora_B.weight": pf.draw(D, R * E),
    }
    change(tensors)
    config = {
        "peft_type": "LORA", "r": R, "lora_alpha": 6, "target_modules": [],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }  # fmt: skip
    return pf.write_raw(folder, config | changes, tensors)


def test_joined_matrices_share_what_is_not_in_blocks(tmp_path):
    m = tiny.model("mixtral", num_hidden_layers=1)
    path = parameters(tmp_path / "a")
    adapter = adapter_sources.open_adapter(path)
    found = attach.attach(adapter, m, base_fingerprint=None)
    tensors = safetensors.numpy.load_file(tmp_path / "a" / peft_files.WEIGHTS)
    key = "base_model.model.model.layers.0.mlp.experts"
    for level, paths in ((".base_layer", EXPERTS[:2]), ("", EXPERTS[2:])):
        a, b = (tensors[f"{key}{level}.lora_{one}.weight"] for one in "AB")
        delta = np.einsum("ore,eri->eio", b.reshape(len(b), R, E), a.reshape(E, R, -1))
        leaves = trees.flatten(found.trainable)
        got = [leaves[f"{p}.lora_a"][0] @ leaves[f"{p}.lora_b"][0] for p in paths]
        np.testing.assert_allclose(np.concatenate(got, axis=2), delta, rtol=0, atol=1e-5)
    assert found.model.adaptation.targets[EXPERTS[0]].ranks == (R,)

    def in_blocks(tensors):
        a, b = (f"{key}.base_layer.lora_{one}.weight" for one in "AB")
        tensors[a], wide = pf.draw(2 * R * E, D), pf.draw(2 * F, 2 * R * E).reshape(-1, 2 * R, E)
        wide[:F, R:], wide[F:, :R] = 0, 0
        tensors[b] = wide.reshape(2 * F, -1)

    both = {"rank_pattern": {"experts.gate_up_proj": 2 * R}, "lora_alpha": 8}
    apart = adapter_sources.open_adapter(parameters(tmp_path / "b", in_blocks, **both))
    target = attach.attach(apart, m, base_fingerprint=None).model.adaptation.targets[EXPERTS[1]]
    assert target.ranks == (R,) and target.scalings == (8 / (2 * R),)


def dropped(part: str):
    def change(tensors):
        for key in [key for key in tensors if part in key]:
            del tensors[key]

    return change


def resized(part: str, *shape: int):
    def change(tensors):
        tensors[next(key for key in tensors if part in key)] = pf.draw(*shape)

    return change


def copied(part: str, old: str, new: str):
    def change(tensors):
        for key in [key for key in tensors if part in key]:
            tensors[key.replace(old, new)] = tensors[key]

    return change


WRONG = [
    (older, copied("experts.2.", "experts.2.", "experts.987654321."), {}, "no adapter on expert 5"),
    (older, copied("gate.lora", "block_sparse_moe", "mlp"), {}, "an older and a newer name"),
    (older, copied("2.w1.lora", "block_sparse_moe", "mlp"), {}, "an older and a newer name"),
    (parameters, dropped("base_layer"), {}, "adapters of 1 parameters, but target_parameters names "
     "model.layers.0.mlp.experts.gate_up_proj, model.layers.0.mlp.experts.down_proj"),
    (parameters, dropped("experts.lora_A"), {}, "has lora_B, where an adapter on experts has"),
    (parameters, resized("experts.lora_A", R * E + 1, F), {}, "hold no experts of rank 3"),
    (parameters, None, {"rank_pattern": {"experts.down_proj": 4}}, "hold no experts of rank 4"),
    (parameters, resized("base_layer.lora_B", 2 * F + 1, R * E), {}, "has 97 rows and rank 3"),
    (parameters, None, {"target_parameters": ["experts.down_proj"]}, "adapters of 2 parameters"),
    (parameters, None, {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "x"]},
     "target_parameters = 'x': names no parameter that has an adapter"),
    (parameters, None, {"rank_pattern": {"nonsuch": 2}}, "'nonsuch': fits no module that has"),
    (older, dropped("experts.3."), {}, "has no adapter on expert 3; adapt all experts"),
    (older, resized("experts.2.w1.lora_A", R, D + 1), {}, "different ranks, alphas or sizes"),
    (older, None, {"rank_pattern": {"gate": 2, r"experts\.1\.w3": 2}}, "different ranks, alphas"),
    (older, None, {"target_modules": ["w1", "w2", "gate"]}, "does not name model.layers.0.mlp.exp"),
    (older, lambda t: t.update({f"{next(iter(t)).removesuffix('lora_A.weight')}"
                                "lora_magnitude_vector": pf.draw(F)}), {"use_dora": True},
     "lora_magnitude_vector on expert"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "change", "changes", "message"), WRONG)
def test_what_is_not_whole_or_not_named_is_refused(make, change, changes, message, tmp_path):
    more = {"change": change} if change else {}
    if make is older:
        more["block"] = "block_sparse_moe"
    path = make(tmp_path / "a", **more, **changes)
    with pytest.raises(errors.ModelError) as caught:
        peft_files.read(path)
    assert message in str(caught.value)


def test_layers_that_are_named_must_be_there(tmp_path):
    adapter = adapter_sources.open_adapter(parameters(tmp_path / "a"))
    with pytest.raises(errors.ModelError, match="layers.1.mlp.experts.down_proj: is a target of"):
        attach.attach(adapter, tiny.model("mixtral", num_hidden_layers=2), base_fingerprint=None)
    twice = older(tmp_path / "b", "mlp", copied("experts.2.up", "experts.2.", "experts.02."))
    with pytest.raises(errors.ModelError, match="experts.02.up_proj: is no module of the base"):
        attach.attach(
            adapter_sources.open_adapter(twice),
            tiny.model("mixtral", num_hidden_layers=2),
            base_fingerprint=None,
        )
    few = tiny.model("mixtral", num_hidden_layers=1, num_local_experts=4)
    with pytest.raises(errors.ModelError, match=r"has shape \[5, 3, 32\], but this model makes it"):
        attach.attach(adapter, few, base_fingerprint=None)


def test_scalings_that_peft_cannot_hold_are_refused(tmp_path):
    adapter = adapted("experts")[2]
    alphas = {"layers.1.mlp.experts.up_proj": 1.0}
    with pytest.raises(errors.ModelError, match="scalings .* and PEFT adapts them as one"):
        peft_files.write(str(tmp_path / "a"), pf.replaced(adapter, alpha_pattern=alphas))


def test_damaged_notes_on_joined_matrices(tmp_path):
    peft_files.write(str(tmp_path / "a"), adapted("experts")[2])
    tensors = safetensors.numpy.load_file(tmp_path / "a" / peft_files.WEIGHTS)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    unfit, unsound = "rank 6, which are not those", "does not state"
    cases = [({"gate_proj": 2}, unfit), ({"nonsuch": 6}, unfit), ({"gate_proj": 0}, unsound)]
    for ranks, message in [*cases, (3, unsound)]:
        facts = {"base_fingerprint": None, "joined": {name: ranks}}
        metadata = {"purelora": json.dumps(facts)}
        safetensors.numpy.save_file(tensors, tmp_path / "a" / peft_files.WEIGHTS, metadata)
        with pytest.raises(errors.ModelError, match=message):
            peft_files.read(str(tmp_path / "a"))


def test_names_without_a_level_are_found(tmp_path):
    """An adapter of a model that is wrapped once more."""
    _, host, adapter = adapted("router")
    inner = {name.replace("model.", "", 1): kinds for name, kinds in adapter.modules.items()}
    moved = dataclasses.replace(adapter, modules=inner)
    peft_files.write(str(tmp_path / "a"), moved)
    placed = attach.attach(
        peft_files.read(str(tmp_path / "a")), tiny.model(FAMILY, **SIZES), base_fingerprint=None
    )
    chex.assert_trees_all_equal(trees.flatten(placed.trainable), host)
    assert adapter_config.is_target(placed.placed.config, "model.layers.0.mlp.gate")
