"""Fields of a config.json that a family cannot follow are named, whatever family they are of."""

import json

import pytest

from purelora.config import command_line
from purelora.core import errors
from purelora.interop import builtin, open_model
from purelora.models import causal_lm
from purelora.weights import hf_folder
from tests.support import families, tiny

# Fields that change what some decoder computes, each with a value that does; and the families that
# have it, by the beginnings of their names here.
FOREIGN = [
    ("attention_bias", True, ("llama", "qwen3", "gemma", "gpt_oss")),
    ("mlp_bias", True, ("llama",)),
    ("attn_logit_softcapping", 5.0, ("gemma2",)),
    ("final_logit_softcapping", 5.0, ("gemma",)),
    ("query_pre_attn_scalar", 7, ("gemma2", "gemma3")),
    ("use_bidirectional_attention", True, ()),
    ("use_bidirectional_attention", "all", ()),
    ("is_causal", False, ()),
    (
        "layer_types",
        ["sliding_attention", "full_attention"],
        ("qwen2", "qwen3", "gemma", "gpt_oss"),
    ),
    ("layer_types", ["full_attention"] * 3, ("qwen2", "qwen3", "gemma", "gpt_oss")),
    ("partial_rotary_factor", 0.5, ()),
    ("original_max_position_embeddings", 16, ()),
    ("rope_local_base_freq", 77.0, ("gemma3",)),
    ("swiglu_limit", 7.0, ("gpt_oss",)),
    ("rope_interleaved", True, ()),
    ("attention_multiplier", 0.5, ()),
    ("embedding_multiplier", 12.0, ()),
    ("residual_multiplier", 0.2, ()),
    ("logits_scaling", 8.0, ()),
    ("logit_scale", 0.1, ()),
    ("num_local_experts", 4, ("mixtral", "qwen3_moe", "gpt_oss")),
    ("num_experts", 4, ("mixtral", "qwen3_moe", "gemma4 with experts")),
    ("shared_expert_intermediate_size", 16, ()),
    ("enable_moe_block", True, ("gemma4",)),
    ("num_kv_shared_layers", 1, ("gemma4",)),
    ("attention_k_eq_v", True, ("gemma4",)),
    ("hidden_size_per_layer_input", 8, ("gemma4",)),
]
# What files may hold of these without any effect.
NEUTRAL = {
    "mlp_bias": False, "is_causal": True, "partial_rotary_factor": 1.0, "logits_scaling": 1.0,
    "rope_interleaved": False, "enable_moe_block": False, "num_kv_shared_layers": 0,
    "shared_expert_intermediate_size": 0, "attention_k_eq_v": None, "n_routed_experts": None,
}  # fmt: skip


def wrapped(text, **changes):
    """The config of a model with images around that of its text model."""
    own = {key: value for key, value in text.items() if key != "architectures"}
    whole = text["architectures"][0].replace("CausalLM", "ConditionalGeneration")
    model_type = text["model_type"].removesuffix("_text")
    return {"architectures": [whole], "model_type": model_type, "text_config": own} | changes


def message(config) -> str:
    with pytest.raises(errors.ModelError) as caught:
        causal_lm.from_hf(config, "config.json", dtype="float32")
    return str(caught.value)


@pytest.mark.parametrize("name", families.CONFIGS)
def test_fields_of_other_families_are_named(name):
    config = tiny.hf_config(name)
    is_qwen3_moe = name.startswith("qwen3_moe")
    checked = 0
    for field, value, known in FOREIGN:
        is_known = name.startswith(known) if known else False
        if is_known and not (is_qwen3_moe and field == "layer_types"):
            continue
        text = message(config | {field: value})
        assert text.startswith(f"config.json: {field} = {value!r}: ")
        assert "; " in text  # What to do.
        if name.startswith(("gemma3", "gemma4")):
            assert f"text_config: {field} = " in message(wrapped(config | {field: value}))
        checked += 1
    assert checked > 10


@pytest.mark.parametrize("name", families.CONFIGS)
def test_neutral_values_of_them_change_nothing(name):
    config = tiny.hf_config(name)
    assert tiny.model(name, **{**NEUTRAL, **config}).config == tiny.model(name).config


def _linear(**changes):
    return {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4} | changes


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("llama", {"rope_parameters": _linear(), "rope_theta": 5.0}, "rope_theta = 5.0: and the "),
        ("llama", {"rope_scaling": _linear(type="yarn")}, "rope type = 'yarn': and rope_type = 'l"),
        ("llama", {"rope_scaling": {"factor": 8.0}},
         "rope fields = {'factor': 8.0}: have no meaning for rope_type 'default'"),
        ("llama", {"rope_scaling": _linear(beta_fast=16)},
         "rope fields = {'beta_fast': 16}: have no meaning for rope_type 'linear'"),
        ("qwen2 with windows and yarn",
         {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fst": 16,
                           "original_max_position_embeddings": 16}},
         "rope fields = {'beta_fst': 16}: have no meaning for rope_type 'yarn'"),
        ("gemma4", {"rope_theta": 5.0}, "rope_theta = 5.0: and the rotation's own rope_theta = 1"),
        ("gemma4", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
         "rope_scaling = {'rope_type': 'linear', 'factor': 8.0}: and rope_parameters differ in"),
        ("gemma3", {"rope_parameters": {"full_attention": _linear(),
                                        "sliding_attention": {"rope_theta": 7.0}},
                    "rope_theta": 1e4, "rope_scaling": None},
         "rope_local_base_freq = 10000.0: and the rotation's own rope_theta = 7.0 differ"),
        ("qwen3_moe", {"num_local_experts": 4},
         "num_local_experts = 4: is the same field as num_experts = 6, and differs"),
        ("mixtral", {"num_experts": 4}, "num_experts = 4: is the same field as num_local_experts"),
        ("gemma3", {"_sliding_window_pattern": 2},
         "_sliding_window_pattern = 2: is the same field as sliding_window_pattern = 3"),
        ("qwen3_moe", {"mlp_only_layers": False}, "mlp_only_layers = False: is not a list"),
        ("qwen3_moe", {"mlp_only_layers": {}}, "mlp_only_layers = {}: is not a list"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
         "max_window_layers = 1: is not supported: with use_sliding_window every layer"),
        ("gemma4 with experts", {"enable_moe_block": False},
         "num_experts = 5: does not go with enable_moe_block = False"),
        ("gemma4", {"per_layer_config": {str(i): {"head_dim": 16, "num_key_value_heads": n}
                                         for i, n in ((2, 1), (5, True), (6, 1))}},
         "per_layer_config = {"),
        ("llama", {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]},
         "architectures = ['LlamaForCausalLM', 'MistralForCausalLM']: is not a list of one"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM': is"),
        ("llama", {"model_type": "mistral"}, "model_type = 'mistral': is not that of LlamaForC"),
        ("qwen3_moe", {"model_type": "qwen3"}, "model_type = 'qwen3': is not that of Qwen3MoeFor"),
        ("gemma3", {"model_type": 3}, "model_type = 3: is not that of Gemma3ForCausalLM"),
    ],
)  # fmt: skip
def test_contradictions_are_named(name, changes, text):
    found = message(tiny.hf_config(name) | changes)
    assert found.startswith(f"config.json: {text}")
    assert "; " in found


def test_the_text_model_must_be_of_the_whole_models_family():
    text = tiny.hf_config("gemma3") | {"model_type": "gemma4_text"}
    found = message(wrapped(text, model_type="gemma3"))
    assert found.startswith("config.json: text_config: model_type = 'gemma4_text': is not that of")


def test_every_layer_of_a_qwen3_mixture_has_the_window():
    changes = {"use_sliding_window": True, "sliding_window": 3}
    for first in ({}, {"max_window_layers": 0}):
        found = tiny.model("qwen3_moe", **changes, **first).config
        assert [kind.window for kind in found.layer_kinds] == [3] * 3


def test_a_key_that_stands_twice_is_named(tmp_path):
    file = tmp_path / "config.json"
    text = json.dumps(tiny.hf_config(), indent=1)
    file.write_text(text.replace('"vocab_size"', '"hidden_size": 48, "vocab_size"'))
    for read in (
        hf_folder.read_config,
        lambda folder: builtin.open_model(f"random:{folder}/config.json"),
    ):
        with pytest.raises(errors.ModelError, match="config.json: holds 'hidden_size' twice"):
            read(str(tmp_path))


def test_random_weights_need_a_config_json(tmp_path):
    for path, better in ((str(tmp_path), f"random:{tmp_path}/config.json"), ("", "random:config")):
        with pytest.raises(
            errors.ModelError, match=f"^random:{path}: is not a file; write {better}"
        ):
            builtin.open_model(f"random:{path}")


def test_the_shape_of_a_quantised_model_is_no_base_to_estimate(tmp_path):
    path = tmp_path / "shape.json"
    config = tiny.hf_config() | {"quantization_config": {"quant_method": "awq"}}
    path.write_text(json.dumps(config))
    with pytest.raises(errors.ModelError, match="quantization_config = 'awq': the weights are st"):
        open_model.open_config(str(path))


def test_estimate_takes_random_weights_as_training_does(tmp_path):
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(tiny.hf_config("mixtral", vocab_size=259)))
    found = open_model.open_config(f"random:{path}")
    assert found == open_model.open_config(str(path))


def test_a_file_without_variants_is_named():
    with pytest.raises(errors.ConfigError) as caught:
        command_line.parse(["--config=configs/tiny.py:small"], flags=())
    assert str(caught.value) == (
        "--config=configs/tiny.py:small: names a variant, but the file has none; "
        "write configs/tiny.py"
    )


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_words_for_modules_stand_alone(key):
    with pytest.raises(errors.ConfigError, match=f"{key} = 'experts': .*only alone$"):
        tiny.model().adapted(tiny.lora_config(**{key: ("experts", "q_proj")}))


@pytest.mark.parametrize("value", ["inf", "nan", "1e40"])
def test_router_coefficients_are_finite(value):
    with pytest.raises(errors.ConfigError, match="must be at least 0 and a float32"):
        command_line.parse(
            ["--config=configs/tiny.py", f"--config.router_z_loss_coef={value}"], flags=()
        )
