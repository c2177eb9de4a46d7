"""gpt-oss alone: its adapters in PEFT's files, whose rows alternate, and what no adapter holds."""

import pathlib
from typing import Any

import numpy as np
import pytest

from purelora.commands import merge
from purelora.core import errors, trees
from purelora.interop import builtin
from purelora.interop.peft import adapter_sources, algebra, artefact, attach
from purelora.interop.peft import files as peft_files
from purelora.sharding import collectives, rules, specs
from tests.support import expert_files, loaded_models, model_files, tiny
from tests.support import peft_folders as pf

SIZES = {"vocab_size": 259, "num_hidden_layers": 2, "layer_types": None}
R, E, D, F = 3, 5, 32, 20
AROUND = "base_model.model.model.layers.1.mlp.experts"
GATE, UP = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate", "up"))


def config() -> dict[str, Any]:
    return tiny.hf_config("gpt_oss", **SIZES)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("base")
    m = tiny.model("gpt_oss", **SIZES)
    arrays = expert_files.in_files(expert_files.stacks(m), "gpt_oss", "interleaved")
    model_files.write_hf(folder, arrays, config())
    return folder


def of_peft(folder: pathlib.Path, base: pathlib.Path | None = None) -> tuple[str, np.ndarray]:
    """PEFT's adapter on `gate_up_proj` of one layer, and its update `[E, D, 2 F]`."""
    a, b = pf.draw(R * E, D), pf.draw(2 * F, R * E)
    settings = {
        "peft_type": "LORA", "r": R, "lora_alpha": 2 * R, "target_modules": [],
        "target_parameters": ["layers.1.mlp.experts.gate_up_proj"],
        "base_model_name_or_path": str(base),
    }  # fmt: skip
    tensors = {f"{AROUND}.lora_A.weight": a, f"{AROUND}.lora_B.weight": b}
    delta = 2 * np.einsum("ore,eri->eio", b.reshape(2 * F, R, E), a.reshape(E, R, D))
    return pf.write_raw(folder, settings, tensors), delta


def updates(adapter: artefact.Adapter) -> np.ndarray:
    """What it adds to gate and up `[E, D, F]`, in alternating columns."""
    zero = np.zeros((E, F, D), np.float32)
    both = [algebra.updated(adapter, name, "weight", zero).swapaxes(1, 2) for name in (GATE, UP)]
    return np.stack(both, axis=-1).reshape(E, D, 2 * F)


def test_rows_of_a_parameter_alternate(tmp_path):
    """Also through files written in between by what does not know the base."""
    path, delta = of_peft(tmp_path / "a")
    adapter = adapter_sources.open_adapter(path, config())
    np.testing.assert_allclose(updates(adapter), delta, rtol=0, atol=1e-5)
    peft_files.write(str(tmp_path / "b"), adapter)
    again = peft_files.read(str(tmp_path / "b"))
    assert again.interleaved
    artefact.check_equal(again, adapter)
    unknowing = algebra.scaled(adapter_sources.open_adapter(path), 0.5)
    assert not unknowing.interleaved
    peft_files.write(str(tmp_path / "c"), unknowing)
    found = adapter_sources.open_adapter(str(tmp_path / "c"), config())
    np.testing.assert_allclose(updates(found), delta / 2, rtol=0, atol=1e-5)
    m = tiny.model("gpt_oss", **SIZES)
    attached = attach.attach(adapter, m, base_fingerprint=None)
    leaves = trees.flatten(attached.trainable)
    up = leaves["layers.mlp.experts.up_proj.lora_a"] @ leaves["layers.mlp.experts.up_proj.lora_b"]
    np.testing.assert_allclose(2 * up[0], delta[..., 1::2], rtol=0, atol=1e-5)
    with pytest.raises(errors.ModelError, match="of a model with other files than this base's"):
        attach.attach(unknowing, m, base_fingerprint=None)
    with pytest.raises(errors.ModelError, match="the rows of experts in different orders"):
        algebra.summed([adapter, unknowing], [1, 1])


def test_adapters_of_single_experts_have_no_such_order(tmp_path):
    key, tensors = "base_model.model.model.layers.0.mlp.experts", {}
    for expert in range(E):
        tensors[f"{key}.{expert}.up_proj.lora_A.weight"] = pf.draw(R, D, seed=expert)
        tensors[f"{key}.{expert}.up_proj.lora_B.weight"] = pf.draw(F, R, seed=expert)
    settings = {"peft_type": "LORA", "r": R, "lora_alpha": 6, "target_modules": ["up_proj"]}
    path = pf.write_raw(tmp_path / "a", settings | {"layers_to_transform": [0]}, tensors)
    adapter, m = adapter_sources.open_adapter(path, config()), tiny.model("gpt_oss", **SIZES)
    leaves = trees.flatten(attach.attach(adapter, m, base_fingerprint=None).trainable)
    found = np.asarray(leaves["layers.mlp.experts.up_proj.lora_b"])[0, 3].T
    np.testing.assert_array_equal(found, tensors[f"{key}.3.up_proj.lora_B.weight"])


def test_merged_into_the_base_that_the_adapter_names(base, tmp_path, capsys):
    """The columns of the joined tensor, and no other element of the folder."""
    path, delta = of_peft(tmp_path / "a", base)
    assert merge.main([f"--adapter={path}", f"--output={tmp_path / 'out'}"]) == 0
    capsys.readouterr()
    before, after = (builtin.open_model(str(p)).source for p in (base, tmp_path / "out"))
    assert before.shapes() == after.shapes()
    for name in before.shapes():
        changed = after.read(name).array - before.read(name).array
        wanted = delta if name == "model.layers.1.mlp.experts.gate_up_proj" else 0
        np.testing.assert_allclose(changed, np.broadcast_to(wanted, changed.shape), atol=1e-5)


def test_what_no_adapter_holds_is_refused():
    m = tiny.model("gpt_oss", **SIZES)

    def refused(**settings):
        with pytest.raises(errors.ConfigError) as caught:
            m.adapted(tiny.lora_config(**settings))
        return str(caught.value)

    assert "lora.bias = 'all': would train layers.mlp.experts.gate_proj.bias" in refused(bias="all")
    text = refused(target_modules=("router",), modules_to_save=("self_attn",))
    assert "would train model.layers.0.self_attn.sinks, which is no weight of a module" in text
    text = refused(target_modules=("q_proj",), modules_to_save=("experts",))
    assert "experts.gate_proj whole, which no adapter holds" in text
    # As in PEFT, the parameters that are adapted of the experts have no biases.
    chosen = m.adapted(tiny.lora_config(target_modules="all-linear", bias="lora_only"))
    assert chosen.adaptation.full == tuple(f"layers.self_attn.{n}_proj.bias" for n in "qkvo")


def test_random_weights_of_a_published_config(tmp_path):
    """A file that says that its weights are packed; sinks and biases begin as in training."""
    more = {"quantization_config": {"quant_method": "mxfp4"}, "experts_per_token": 2}
    model_files.write_json(tmp_path / "config.json", config() | more)
    opened = builtin.open_model(f"random:{tmp_path / 'config.json'}")
    _, weights = loaded_models.loaded(f"random:{tmp_path / 'config.json'}")
    assert opened.source.shapes() == dict(tiny.model("gpt_oss", **SIZES).layout.shapes)
    flat = trees.flatten(weights)
    assert not np.asarray(flat["layers.self_attn.sinks.weight"]).any()
    assert np.asarray(flat["layers.mlp.experts.down_proj.weight"]).std() == pytest.approx(0.02, 0.1)


def test_sinks_are_split_as_the_heads_are():
    """Where the projections are whole by an override, the sinks must be too."""
    m = tiny.model("gpt_oss", **SIZES, num_attention_heads=4, num_key_value_heads=2)
    mesh = tiny.mesh(tensor=2)

    def placed(pattern):
        chosen = rules.parse_rules(
            ["heads:tensor", "kv_heads:tensor"], {pattern: "heads:none,kv_heads:none"}
        )
        found = specs.spec_tree(m.infos, mesh, chosen, m.axis_counts)
        collectives.shards(found, m.flat_infos)
        return trees.flatten(found)["layers.self_attn.sinks.weight"]

    assert placed("lm_head") == specs.P(None, "tensor")
    assert placed("self_attn.*") == specs.P(None, None)
    with pytest.raises(errors.ConfigError, match=r"split layers.self_attn.sinks over tensor, but"):
        placed(".*_proj")
