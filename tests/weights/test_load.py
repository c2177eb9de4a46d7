"""Loading a base: layouts, placement, fingerprints and weights that do not fit."""

import itertools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
import safetensors.numpy

from purelora.core import errors, trees
from purelora.formats import gguf_file, source
from purelora.interop import builtin
from purelora.interop.gguf import read as gguf_read
from purelora.models import causal_lm
from purelora.ops import quant
from purelora.sharding import specs
from purelora.weights import hf_folder, random_weights
from purelora.weights import load as weights_load
from tests.support import model_files, peak_memory


def tiny_arrays(tied: bool = True) -> tuple[dict, dict[str, np.ndarray]]:
    config = {**builtin.tiny().source.config, "tie_word_embeddings": tied}
    arrays = random_weights.drawn(config, seed=0)
    if not tied and "lm_head.weight" not in arrays:
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"][::-1].copy()
    return config, arrays


def load_tiny(arrays, config, *, qtype="none", dtype="float32", tile_size=None, fsdp=1):
    model = causal_lm.from_hf(config, "tiny", dtype=dtype)
    mesh = specs.make_mesh(1, fsdp, jax.devices()[:fsdp])
    infos = quant.quantised_infos(model.infos, qtype=qtype, tile_size=tile_size, skip=("norm",))
    placed = specs.shardings(specs.spec_tree(infos, mesh), mesh)
    return (
        infos,
        placed,
        weights_load.load(source.ArraySource("tiny", config, arrays), model, infos, placed),
    )


@pytest.mark.parametrize("tied", [True, False])
def test_kernels_are_transposed_and_stacked_tables_kept(tied):
    config, arrays = tiny_arrays(tied)
    tree = load_tiny(arrays, config)[2].tree
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        np.testing.assert_array_equal(
            tree["layers"]["mlp"]["down_proj"]["weight"][layer], arrays[name].T
        )
        norm = tree["layers"]["input_layernorm"]["weight"][layer]
        np.testing.assert_array_equal(norm, arrays[f"model.layers.{layer}.input_layernorm.weight"])
    np.testing.assert_array_equal(
        tree["embed_tokens"]["weight"], arrays["model.embed_tokens.weight"]
    )
    assert ("lm_head" in tree) == (not tied)


@pytest.mark.parametrize(
    ("qtype", "tile_size", "fsdp"),
    [
        ("int8", None, 1),
        ("int8", None, 8),
        ("int8", 8, 1),
        ("int8", 8, 8),
        ("int4", 8, 8),
        ("nf4", 8, 4),
        ("fp8", None, 8),
    ],
)
def test_quantised_while_loading_equals_quantised_afterwards(qtype, tile_size, fsdp):
    config, arrays = tiny_arrays()
    infos, placed, loaded = load_tiny(arrays, config, qtype=qtype, tile_size=tile_size, fsdp=fsdp)
    floats = load_tiny(arrays, config)[2].tree
    want = trees.map_leaves(
        lambda w, i: quant.quantise(w, i) if isinstance(i, qwix.QArray) else w, floats, infos
    )
    chex.assert_trees_all_equal(jax.device_get(loaded.tree), jax.device_get(want))
    jax.tree.map(lambda leaf, where: chex.assert_equal(leaf.sharding, where), loaded.tree, placed)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"qtype": "int8"}, {"fsdp": 8}])
def test_the_fingerprint_is_that_of_the_source_alone(options):
    config, arrays = tiny_arrays()
    plain = load_tiny(arrays, config)[2].fingerprint
    assert load_tiny(arrays, config, **options)[2].fingerprint == plain
    changed = {**arrays, "model.norm.weight": arrays["model.norm.weight"] + np.float32(1e-6)}
    assert load_tiny(changed, config, **options)[2].fingerprint != plain


def test_bfloat16_storage_rounds_to_nearest():
    config, arrays = tiny_arrays()
    leaf = load_tiny(arrays, config, dtype="bfloat16")[2].tree["embed_tokens"]["weight"]
    assert leaf.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(
        leaf, jnp.asarray(arrays["model.embed_tokens.weight"], jnp.bfloat16)
    )


def test_all_tensors_that_do_not_fit_are_named_in_one_error():
    config, arrays = tiny_arrays()
    del arrays["model.norm.weight"]
    arrays["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 5), np.float32)
    arrays["model.layers.0.mlp.extra.weight"] = np.zeros((3,), np.float32)
    with pytest.raises(errors.ModelError) as caught:
        load_tiny(arrays, config)
    text = str(caught.value)
    assert "holds no tensor 'model.norm.weight'" in text
    assert "model.layers.1.mlp.up_proj.weight: has shape [3, 5]" in text
    assert "'model.layers.0.mlp.extra.weight' that this architecture does not have" in text


def test_a_stored_head_of_a_tied_model_must_be_the_embedding():
    config, arrays = tiny_arrays()
    plain = load_tiny(arrays, config)[2]
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    chex.assert_trees_all_equal(load_tiny(arrays, config)[2].tree, plain.tree)
    arrays["lm_head.weight"][0, 0] += 1
    with pytest.raises(errors.ModelError, match="differs from model.embed_tokens.weight"):
        load_tiny(arrays, config)


def test_a_weight_that_is_not_finite_is_refused():
    config, arrays = tiny_arrays()
    arrays["model.layers.1.mlp.up_proj.weight"][2, 3] = np.nan
    with pytest.raises(errors.ModelError, match=r"layers\.1\.mlp\.up_proj\.weight.*not finite"):
        load_tiny(arrays, config)


@pytest.mark.parametrize("kind", ["hf", "gguf", "arrays"])
def test_a_part_of_a_tensor_is_that_part_of_the_whole(tmp_path, kind):
    """Rows, columns and both; in GGUF files the rows of q and k lie in another order."""
    config, arrays = tiny_arrays()
    arrays["experts"] = np.arange(4 * 6 * 5, dtype=np.float32).reshape(4, 6, 5)
    if kind == "hf":
        (tmp_path / "config.json").write_text(json.dumps(config))
        safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
        opened: source.Source = hf_folder.open_folder(str(tmp_path))
    elif kind == "gguf":
        model_files.write_tiny_gguf(tmp_path / "a.gguf")
        opened = gguf_read.open_file(str(tmp_path / "a.gguf"))
    else:
        opened = source.ArraySource("tiny", config, arrays)
    for name, shape in opened.shapes().items():
        whole = opened.read(name).array
        for cuts in itertools.product([(0, 1), (1, 3), (0, None)], repeat=len(shape)):
            box = tuple(
                slice(start, size if stop is None else stop)
                for (start, stop), size in zip(cuts, shape, strict=True)
            )
            np.testing.assert_array_equal(opened.read_part(name, box), whole[box], err_msg=name)


def test_rows_of_quantised_blocks_are_those_of_the_whole(tmp_path):
    data = np.random.default_rng(0).integers(0, 60, (6, 2 * 34), dtype=np.uint8)
    model_files.write_gguf(tmp_path / "a.gguf", {}, {"t": (data, "Q8_0")})
    opened = gguf_file.open_container(str(tmp_path / "a.gguf"))
    rows = opened.read_rows("t", slice(2, 5))
    np.testing.assert_array_equal(rows, opened.read("t").array[2:5])


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_complete_and_even(count):
    sizes = {f"t{i}": (i * 37) % 11 + 1 for i in range(40)}
    shares = weights_load.even_shares(sizes, count)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    totals = [sum(sizes[name] for name in share) for share in shares]
    assert max(totals) - min(totals) <= max(sizes.values())


@pytest.mark.parametrize(
    ("qtype", "bits"), [("int8", 8), pytest.param("nf4", 4, marks=pytest.mark.slow)]
)
def test_memory_peaks_at_the_base_and_one_tensor(tmp_path, qtype, bits):
    """A 600 MB file as a base of 150 or 75 MB: the file, or all floats, would be seen."""
    config = {
        **builtin.tiny().source.config,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 9,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
    }
    arrays = random_weights.drawn(config, seed=0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    on_disk = (tmp_path / "model.safetensors").stat().st_size
    grown = peak_memory.peak_growth(tmp_path, qtype)
    one_tensor = 4096 * 1024 * 4
    # Compiling the fillers takes memory of its own, which does not grow with the model.
    assert grown < on_disk * bits / 32 + one_tensor + 400e6 < on_disk
