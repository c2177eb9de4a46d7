"""Experts in files: every layout is read into the same stacks, and written as it was read."""

import json
import math

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
import qwix
import safetensors.numpy

from purelora.core import errors, trees
from purelora.formats import source
from purelora.interop import merged_model, open_model
from purelora.models import causal_lm
from purelora.ops import quant
from purelora.weights import hf_folder
from purelora.weights import load as weights_load
from tests.support import peak_memory, tiny
from tests.support.expert_files import in_files, shardings, stacks

LAYOUTS = [
    ("mixtral", "own"), ("mixtral", "fused"), ("qwen3_moe", "own"), ("qwen3_moe", "fused"),
    ("gpt_oss", "interleaved"),
]  # fmt: skip


def loaded(arrays, m: causal_lm.CausalLM, *, qtype="none", tile=None, mesh=None, experts=None):
    mesh = tiny.mesh() if mesh is None else mesh
    infos = quant.quantised_infos(m.infos, qtype=qtype, tile_size=tile, skip=("gate",))
    placed = shardings(m, infos, mesh, experts)
    opened = source.ArraySource("memory", {}, arrays)
    return infos, placed, weights_load.load(opened, m, infos, placed)


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_every_layout_is_read_into_the_same_stacks(family, layout):
    m = tiny.model(family)
    leaves = stacks(m)
    arrays = in_files(leaves, family, layout)
    assert m.layout_of(arrays).shapes == {name: array.shape for name, array in arrays.items()}
    found = loaded(arrays, m)[2]
    chex.assert_trees_all_equal(trees.flatten(found.tree), leaves)
    assert found.fingerprint == source.identify(source.ArraySource("", {}, arrays), arrays)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "qtype", "tile", "sizes", "experts"),
    [
        ("own", "none", None, {"fsdp": 3, "tensor": 2}, "fsdp"),
        ("fused", "int8", 4, {"fsdp": 2, "tensor": 2}, "fsdp"),
        ("own", "nf4", 4, {"fsdp": 2, "tensor": 2}, "tensor"),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                ("fused", "none", None, {"fsdp": 4, "tensor": 2}, None),
                ("own", "int8", None, {"fsdp": 2, "tensor": 2}, None),
                ("own", "int4", None, {"fsdp": 2}, "fsdp"),
                ("fused", "int4", 4, {"fsdp": 2}, None),
                ("fused", "fp8", None, {"fsdp": 2}, None),
            )
        ),
    ],
)
def test_quantised_and_spread_while_loading(layout, qtype, tile, sizes, experts):
    """Also with the experts themselves over the mesh."""
    m = tiny.model("qwen3_moe", num_hidden_layers=2, hidden_size=24, moe_intermediate_size=16)
    leaves = stacks(m)
    infos, placed, found = loaded(
        in_files(leaves, "qwen3_moe", layout),
        m,
        qtype=qtype,
        tile=tile,
        mesh=tiny.mesh(**sizes),
        experts=experts,
    )
    wanted = trees.map_leaves(
        lambda w, i: (
            jax.jit(quant.quantise, static_argnums=1)(w, i) if isinstance(i, qwix.QArray) else w
        ),
        trees.unflatten(leaves),
        infos,
    )
    chex.assert_trees_all_equal(jax.device_get(found.tree), jax.device_get(wanted))
    jax.tree.map(lambda leaf, where: chex.assert_equal(leaf.sharding, where), found.tree, placed)


class Counted(source.ArraySource):
    """Notes what is read."""

    def __init__(self, arrays: dict[str, np.ndarray], identity: str | None):
        super().__init__("memory", {}, arrays, identity)
        object.__setattr__(self, "whole", [])
        object.__setattr__(self, "elements", 0)

    def read(self, name):
        self.whole.append(name)
        return super().read(name)

    def read_part(self, name, box):
        part = super().read_part(name, box)
        object.__setattr__(self, "elements", self.elements + part.size)
        return part


@pytest.mark.parametrize("layout", ["own", "fused"])
def test_a_tensor_is_read_whole_at_most_once(layout):
    """Whole to be hashed. A source with an identity is not hashed: each element is read once."""
    m = tiny.model("qwen3_moe")
    arrays = in_files(stacks(m), "qwen3_moe", layout)
    placed = shardings(m, m.infos, tiny.mesh(), None)
    hashed = Counted(arrays, None)
    weights_load.load(hashed, m, m.infos, placed)
    assert sorted(hashed.whole) == sorted(arrays)
    # What it holds besides is read by itself when its leaf's turn has come; but for the last layer,
    # whose tensor is still there then.
    up = math.prod(m.flat_infos["layers.mlp.experts.up_proj.weight"].shape[1:])
    assert hashed.elements == (up * (tiny.LAYERS - 1) if layout == "fused" else 0)
    known = Counted(arrays, "identity")
    weights_load.load(known, m, m.infos, placed)
    assert not known.whole and known.elements == sum(array.size for array in arrays.values())


@pytest.mark.parametrize("layout", ["own", "fused"])
def test_what_only_other_processes_hold_is_hashed_too(layout, monkeypatch):
    """One of two processes: it reads its half of the experts, and hashes its share of tensors."""
    m = tiny.model("qwen3_moe")
    arrays = in_files(stacks(m), "qwen3_moe", layout)
    opened = Counted(arrays, None)
    reader_of = []
    for index in range(2):
        monkeypatch.setattr(weights_load.runtime, "process_count", lambda: 2)
        monkeypatch.setattr(weights_load.runtime, "process_index", lambda index=index: index)
        reader_of.append(weights_load._Reader(opened, m.layout_of(arrays)))
    owned = [reader._own for reader in reader_of]
    assert owned[0] | owned[1] == set(arrays) and not owned[0] & owned[1]
    monkeypatch.setattr(weights_load.runtime, "gathered", lambda _, text: said.append(text) or said)
    said: list[str] = []
    for reader in reader_of:
        found = reader.fingerprint()
    assert found == source.identify(source.ArraySource("", {}, arrays), arrays)


def test_what_is_missing_mixed_or_too_much_is_named():
    m = tiny.model("mixtral")
    leaves = stacks(m)
    own, fused = (in_files(leaves, "mixtral", layout) for layout in ("own", "fused"))

    def message(arrays) -> str:
        with pytest.raises(errors.ModelError) as caught:
            loaded(arrays, m)
        return str(caught.value)

    gone = "model.layers.1.block_sparse_moe.experts.4.w2.weight"
    assert f"holds no tensor '{gone}'" in message({n: a for n, a in own.items() if n != gone})
    joined = "model.layers.2.mlp.experts.gate_up_proj"
    short = {**fused, joined: fused[joined][:, :50]}
    assert f"{joined}: has shape [5, 50, 32], but config.json makes it [5, 96, 32]" in message(
        short
    )
    sixth = gone.replace(".4.", ".5.")
    text = message({**own, sixth: own[gone]})
    assert f"{sixth!r} that this architecture does not have" in text
    both = message({**own, joined: fused[joined]})
    assert f"{joined!r}, which in files like this one has another name" in both
    # One layer of the other kind: what it lacks and what it has.
    mixed = {n: a for n, a in own.items() if ".layers.2.block" not in n}
    mixed |= {n: a for n, a in fused.items() if ".layers.2.mlp" in n}
    text = message(mixed)
    assert "holds no tensor 'model.layers.2.block_sparse_moe" in text


@pytest.mark.parametrize("layout", ["own", "fused"])
def test_an_expert_that_is_not_finite_is_named(layout):
    m = tiny.model("qwen3_moe")
    arrays = in_files(stacks(m), "qwen3_moe", layout)
    part = "experts.1.up_proj" if layout == "own" else "experts.gate_up_proj"
    name = next(n for n in arrays if "layers.1." in n and part in n)
    arrays[name] = arrays[name].copy()
    arrays[name][(1, -1, 0) if layout == "fused" else (-1, 0)] = np.nan
    with pytest.raises(errors.ModelError, match=rf"{name}: holds values that are not finite"):
        loaded(arrays, m)


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_written_as_read(family, layout, tmp_path):
    """A folder in bfloat16 through the writer of merged models: the same names, shapes and bits."""
    m = tiny.model(family)
    arrays = in_files(stacks(m, ml_dtypes.bfloat16), family, layout)
    config = {**tiny.hf_config(family), "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    opened = hf_folder.open_folder(str(tmp_path))
    form = merged_model.output_form(None, config, is_gguf=False)
    merged = merged_model.MergedModel(opened, m, [], lambda _, values: values, form)
    made = {name: spec.load() for name, spec in merged.tensors().items()}
    assert made.keys() == arrays.keys()
    for name, array in arrays.items():
        assert made[name].shape == array.shape and made[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_run_has_the_layout_of_its_family(family):
    m = tiny.model(family)
    leaves = stacks(m)
    run = open_model.RunSource("run", tiny.hf_config(family), None, m, leaves)
    wanted = in_files(leaves, family, "interleaved" if family == "gpt_oss" else "own")
    assert run.shapes() == {name: array.shape for name, array in wanted.items()}
    for name, array in wanted.items():
        np.testing.assert_array_equal(run.read(name).array, array, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["own", "fused"])
def test_memory_peaks_at_the_base_and_one_tensor(layout, tmp_path):
    """A file of 400 MB as a base of 100 MB; a layer's experts in floats would be 100 MB more."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 64}
    m = tiny.model("qwen3_moe", num_hidden_layers=4, **sizes)
    arrays = in_files(stacks(m), "qwen3_moe", layout)
    config = tiny.hf_config("qwen3_moe", num_hidden_layers=4, **sizes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    grown = peak_memory.peak_growth(tmp_path, "int8")
    one_tensor = max(array.nbytes for array in arrays.values())
    assert grown < sum(array.nbytes for array in arrays.values()) / 4 + one_tensor + 150e6
