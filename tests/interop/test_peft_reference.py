"""Adapters exchanged with PEFT itself, in both directions, for every feature."""

import dataclasses
import json
import os
import warnings

import numpy as np
import pytest
import safetensors.numpy

from purelora.core import errors
from purelora.interop.peft import adapter_config, artefact, config_keys
from purelora.interop.peft import files as peft_files
from tests.support import peft_folders as pf

pytestmark = pytest.mark.reference


def llama(name):
    """A tiny Llama that suits a case: with biases, or a tied head."""
    import torch
    import transformers

    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=pf.VOCAB,
            hidden_size=pf.WIDTH,
            intermediate_size=pf.INNER,
            num_hidden_layers=pf.LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings="tied" in name,
            attention_bias="bias" in name,
        )
    )


def peft_model(name):
    """PEFT around `llama` with the config of a case; every trained tensor is moved at random."""
    import torch
    from peft import LoraConfig, get_peft_model

    given = config_keys.to_json(pf.CASES[name][0])
    del given["peft_type"]
    model = get_peft_model(llama(name), LoraConfig(**given | {"inference_mode": False}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save(model, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return str(folder)


def stored(folder):
    return safetensors.numpy.load_file(os.path.join(folder, peft_files.WEIGHTS))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", pf.CASES)
def test_reads_what_peft_wrote(tmp_path, name):
    settings, modules = pf.CASES[name]
    found = peft_files.read(save(peft_model(name), tmp_path / "a"))
    assert {m: set(kinds) for m, kinds in found.modules.items()} == {
        m: set(kinds) for m, kinds in modules.items()
    }
    # PEFT lists the modules that it found, where it had to look for them.
    rest = {"target_modules": ()} if name in ("all-linear", "embedding tied") else {}
    assert dataclasses.replace(found.config, **rest) == dataclasses.replace(settings, **rest)
    # Written again, it is the same file.
    peft_files.write(str(tmp_path / "b"), found)
    theirs, ours = stored(tmp_path / "a"), stored(tmp_path / "b")
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_array_equal(ours[key], array, err_msg=key)


@pytest.mark.parametrize("name", pf.CASES)
def test_peft_loads_what_is_written(tmp_path, name):
    import torch
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    adapter = pf.case(name)
    folder = str(tmp_path / "a")
    peft_files.write(folder, adapter)
    # Any warning fails, but for those that libraries give about themselves.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PeftConfig.from_pretrained(folder)
        warnings.filterwarnings("ignore", category=FutureWarning)
        model = PeftModel.from_pretrained(llama(name), folder)
        result = model.load_adapter(folder, "default")
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if ".default" in key]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = get_peft_model_state_dict(model)
    tensors = stored(folder)
    assert state.keys() == tensors.keys()
    for key, array in tensors.items():
        assert torch.equal(state[key], torch.from_numpy(array)), key
    for module, layer in model.base_model.model.named_modules():
        if hasattr(layer, "lora_A"):
            assert layer.scaling["default"] == adapter_config.scaling(adapter.config, module)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_peft_changes_the_base_for_these_initialisations(tmp_path, init):
    """The reason for refusing them: PEFT's model is not the base plus B A."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)
    folder = save(get_peft_model(llama("plain"), config), tmp_path / "a")
    loaded = PeftModel.from_pretrained(llama("plain"), folder)
    changed = loaded.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    plain = llama("plain").model.layers[0].self_attn.q_proj.weight
    assert not torch.allclose(changed, plain)
    with pytest.raises(errors.ModelError, match=f"init_lora_weights = '{init}'"):
        peft_files.read(folder)


@pytest.mark.filterwarnings("ignore")
def test_converted_initialisation_is_read(tmp_path):
    """The remedy of that error works: PEFT then saves a plain adapter of twice the rank."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    model = get_peft_model(llama("plain"), config)
    model.peft_config["default"].init_lora_weights = True
    initial = save(model, tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    model.save_pretrained(tmp_path / "a", path_initial_model_for_weight_conversion=initial)
    found = peft_files.read(str(tmp_path / "a"))
    assert (found.config.r, found.config.init_lora_weights) == (8, "default")


@pytest.mark.filterwarnings("ignore")
def test_adapter_of_the_inner_model_lacks_a_level(tmp_path):
    """An adapter of LlamaModel, without the head, goes to the whole model (peft#1579)."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama("plain").model, LoraConfig(r=4, target_modules=["q_proj"]))
    found = peft_files.read(save(model, tmp_path / "a"))
    assert "layers.0.self_attn.q_proj" in found.modules
    placed = artefact.place(found, pf.NAMES)
    assert set(placed.modules) == {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}


@pytest.mark.filterwarnings("ignore")
def test_resized_embedding_is_refused_by_name(tmp_path):
    """PEFT adds both embeddings, in full, to any adapter when it is told that they changed."""
    model = peft_model("lora")
    model.save_pretrained(tmp_path / "a", save_embedding_layers=True)
    with pytest.raises(errors.ModelError, match="does not name model.embed_tokens, which has a"):
        peft_files.read(str(tmp_path / "a"))


def test_every_key_of_peft_is_decided_on():
    """A new key of PEFT must be put into one of the tables."""
    from peft import LoraConfig

    parsed = config_keys.PARSERS
    tables = (parsed, config_keys.HISTORY, config_keys.NO_EFFECT, config_keys.REFUSED)
    assert set(json.loads(json.dumps(LoraConfig().to_dict()))) <= {k for t in tables for k in t}


@pytest.mark.parametrize("name", [name for name in pf.CASES if name != "all-linear"])
def test_modules_and_ranks_are_those_of_peft(name):
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    settings = pf.CASES[name][0]
    if name == "layers":
        full = ("q_proj", "model.layers.0.mlp.up_proj")
        settings = dataclasses.replace(settings, target_modules=full)
    config = LoraConfig(**config_keys.to_json(settings))
    for module in pf.NAMES:
        if not adapter_config.is_saved(settings, module):
            expected = bool(check_target_module_exists(config, module))
            assert adapter_config.is_target(settings, module) == expected, module
        key = get_pattern_key(list(settings.rank_pattern), module)
        assert adapter_config.rank(settings, module) == settings.rank_pattern.get(key, settings.r)
