"""Adapters in PEFT's format: what is written is read back, PEFT agrees, and damage is named."""

import dataclasses
import json
import math
import os
import stat

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import purelora
from purelora.core import errors
from purelora.formats import safetensors_file
from purelora.interop.peft import adapter_config, artefact, config_keys
from purelora.interop.peft import files as peft_files
from purelora.lora import targets
from tests.support import model_files
from tests.support import peft_folders as pf

Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def refused(path: str, message: str) -> errors.ModelError:
    with pytest.raises(errors.ModelError, match=message) as caught:
        peft_files.read(path)
    return caught.value


# ---- round trip --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pf.CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_back_what_was_written(tmp_path, name, dtype):
    adapter = pf.case(name, dtype)
    peft_files.write(str(tmp_path / "a"), adapter)
    found = peft_files.read(str(tmp_path / "a"))
    pf.assert_same(found, adapter)
    assert os.listdir(tmp_path) == ["a"]
    assert sorted(os.listdir(tmp_path / "a")) == ["adapter_config.json", peft_files.WEIGHTS]


def test_keys_are_those_of_peft(tmp_path):
    """Literal keys of PEFT 0.21; the reference tests compare all of them with PEFT itself."""

    def keys(name):
        peft_files.write(str(tmp_path / name), pf.case(name))
        found = safetensors.numpy.load_file(tmp_path / name / peft_files.WEIGHTS)
        return {
            key.replace("model.layers.0.self_attn.", "~").removeprefix("base_model.model.")
            for key in found
            if "layers.1" not in key
        }

    embedding = {"lora_embedding_A", "lora_embedding_B", "base_layer.weight"}
    q = {"~q_proj.lora_A.weight", "~q_proj.lora_B.weight"}
    assert keys("dora") == q | {"~q_proj.lora_magnitude_vector"}
    assert keys("save") == q | {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    assert keys("tokens") == q | {"model.embed_tokens.token_adapter.trainable_tokens_delta"}
    biases = {"~q_proj.base_layer.bias", "~k_proj.bias", "~v_proj.bias", "~o_proj.bias"}
    assert keys("bias all") == q | biases
    assert keys("embedding dora") == {
        f"model.embed_tokens.{end}" for end in {*embedding, "lora_magnitude_vector"}
    }
    assert keys("save tied") == q | {"model.embed_tokens.weight", "lm_head.weight"}
    assert keys("embedding tied") == q | {f"model.embed_tokens.{end}" for end in embedding} | {
        f"lm_head.{end}" for end in ("lora_A.weight", "lora_B.weight", "base_layer.weight")
    }


def test_tied_head_gets_the_embedding_s_tensors(tmp_path):
    adapter = pf.case("embedding tied")
    peft_files.write(str(tmp_path / "a"), adapter)
    tensors = safetensors.numpy.load_file(tmp_path / "a" / peft_files.WEIGHTS)
    embedding = adapter.modules["model.embed_tokens"]
    head = "base_model.model.lm_head"
    np.testing.assert_array_equal(
        tensors[f"{head}.lora_B.weight"] @ tensors[f"{head}.lora_A.weight"],
        embedding["lora_embedding_A"].T @ embedding["lora_embedding_B"].T,
    )
    tensors[f"{head}.lora_A.weight"][0, 0] += 1
    safetensors.numpy.save_file(tensors, tmp_path / "a" / peft_files.WEIGHTS)
    refused(str(tmp_path / "a"), "target_modules.*does not name lm_head, which has an adapter")


def test_config_as_written(tmp_path):
    peft_files.write(str(tmp_path / "a"), pf.case("lora"))
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text()) == {
        "alpha_pattern": {},
        "base_model_name_or_path": None,
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": 7.5,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["down_proj", "q_proj"],
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_rslora": False,
    }


def test_names_are_written_sorted(tmp_path):
    """They are sets in PEFT; two runs must not differ in their files."""
    given = pf.replaced(pf.case("lora"), target_modules=("q_proj", "down_proj"))
    peft_files.write(str(tmp_path / "a"), given)
    written = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert written["target_modules"] == ["down_proj", "q_proj"]


def test_full_weights_are_named_in_full(tmp_path):
    """PEFT compares bare endings: `norm` would ask for the weights of all norms of all layers."""
    adapter = pf.replaced(pf.case("save"), modules_to_save=("lm_head", "embed_tokens", "norm"))
    peft_files.write(str(tmp_path / "a"), adapter)
    saved = peft_files.read(str(tmp_path / "a")).config.modules_to_save
    assert saved == ("lm_head", "model.embed_tokens", "model.norm")


def test_metadata(tmp_path):
    peft_files.write(str(tmp_path / "a"), pf.case("lora"), extra_metadata={"step": 3})
    with safetensors.safe_open(tmp_path / "a" / peft_files.WEIGHTS, "numpy") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert json.loads(metadata["purelora"]) == {
        "base_fingerprint": "f" * 64,
        "purelora_version": purelora.__version__,
        "step": 3,
    }
    peft_files.write(str(tmp_path / "b"), pf.case("lora", fingerprint=None))
    found = peft_files.read(str(tmp_path / "b"))
    assert found.base_fingerprint is None
    assert any("does not say which base" in note for note in found.notes)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": 1}', '{"base_fingerprint": 3}'])
def test_damaged_metadata(tmp_path, text):
    folder = pf.write_raw(tmp_path / "a", pf.MINIMAL, pf.keys_of(pf.Q), {"purelora": text})
    refused(folder, "metadata 'purelora'.*does not state a base_fingerprint")


# ---- layouts of other versions -----------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.", ""])
@pytest.mark.parametrize("name", ["", ".default", ".my-adapter"])
def test_prefixes_and_adapter_names(tmp_path, prefix, name):
    kinds = {
        f"lora_A{name}.weight": pf.draw(4, 16),
        f"lora_B{name}.weight": pf.draw(16, 4),
        f"lora_magnitude_vector{name}": pf.draw(16),
    }
    embedding = {
        f"lora_embedding_A{name}": pf.draw(4, 32),
        f"lora_embedding_B{name}": pf.draw(16, 4),
        f"lora_magnitude_vector{name}.weight": pf.draw(16),
    }
    tensors = {f"{prefix}model.layers.0.self_attn.q_proj.{end}": a for end, a in kinds.items()}
    tensors |= {f"{prefix}model.embed_tokens.{end}": a for end, a in embedding.items()}
    tensors |= {f"{prefix}lm_head.modules_to_save{name}.weight": pf.draw(32, 16)}
    changes = {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}
    data = pf.MINIMAL | changes | {"modules_to_save": ["lm_head"]}
    found = peft_files.read(pf.write_raw(tmp_path / "a", data, tensors))
    pf.assert_same_modules(
        found.modules,
        {
            "model.layers.0.self_attn.q_proj": {
                "lora_A": pf.draw(4, 16),
                "lora_B": pf.draw(16, 4),
                "lora_magnitude_vector": pf.draw(16),
            },
            "model.embed_tokens": {
                "lora_embedding_A": pf.draw(4, 32),
                "lora_embedding_B": pf.draw(16, 4),
                "lora_magnitude_vector": pf.draw(16),
            },
            "lm_head": {"weight": pf.draw(32, 16)},
        },
    )
    said = " ".join(found.notes)
    assert ("where PEFT writes" in said) == (prefix != "base_model.model.")
    assert ("holds the adapter's name" in said.replace("hold", "holds", 1)) == bool(name)


def test_trained_rows_and_saved_modules_with_names_and_levels(tmp_path):
    tensors = pf.keys_of(pf.Q) | {
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.default": pf.draw(
            2, 16
        ),
        "base_model.model.model.layers.0.mlp.modules_to_save.default.up_proj.weight": pf.draw(3, 4),
        "base_model.model.model.layers.0.mlp.modules_to_save.default.up_proj.bias": pf.draw(3),
    }
    changes = {"trainable_token_indices": [7, 1], "modules_to_save": ["mlp"]}
    found = peft_files.read(pf.write_raw(tmp_path / "a", pf.MINIMAL | changes, tensors))
    assert set(found.modules["model.embed_tokens"]) == {"trainable_tokens"}
    assert set(found.modules["model.layers.0.mlp.up_proj"]) == {"weight", "bias"}
    assert found.config.trainable_token_indices == {"embed_tokens": (7, 1)}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight", "not understood"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "lora_bias is not supp"),
        ("base_model.model.model.layers.0.q_proj.lora_B.default.bias", "lora_bias is not supp"),
        ("base_model.model.prompt_encoder.default.embedding", "is a tensor that is not understood"),
        ("base_model.model.lm_head.modules_to_save.default.lora_A.weight", "not understood"),
        ("base_model.model.a.base_layer.base_layer.weight", "is a tensor that is not understood"),
        ("weight", "is a tensor that is not understood"),
        (Q_A.removeprefix("base_model.model."), "has another prefix"),
        (Q_A.replace(".weight", ".default.weight"), "is a second lora_A of model.layers.0"),
    ],
)
def test_keys_that_are_not_understood_are_named(tmp_path, key, message):
    folder = pf.write_minimal(tmp_path, lambda tensors: tensors.update({key: pf.draw(4, 16)}))
    refused(folder, message)


def test_keys_of_two_adapters(tmp_path):
    tensors = pf.keys_of(pf.Q)
    tensors = {
        key.replace(".weight", f".{'one' if '.0.' in key else 'two'}.weight"): array
        for key, array in tensors.items()
    }
    folder = pf.write_raw(tmp_path / "a", pf.MINIMAL, tensors)
    refused(folder, "keys: belong to 2 adapters: one, two")


# ---- the config --------------------------------------------------------------------------------


@pytest.mark.parametrize(("damage", "message"), model_files.JSON_DAMAGE)
def test_damaged_config(tmp_path, damage, message):
    folder = pf.write_minimal(tmp_path)
    damage(tmp_path / peft_files.CONFIG)
    refused(folder, message)


def test_missing_files(tmp_path):
    refused(str(tmp_path / "absent"), "is not a folder")
    refused(str(tmp_path), "has no adapter_config.json")
    (tmp_path / peft_files.CONFIG).write_text(json.dumps(pf.MINIMAL))
    refused(str(tmp_path), f"has no {peft_files.WEIGHTS}; give a folder that holds")
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    refused(str(tmp_path), "adapter_model.bin is a pickle.*load it in PEFT and save it again")
    (tmp_path / "adapter_model.bin").unlink()
    index = {"weight_map": {"a": "../../outside.safetensors"}}
    model_files.write_json(tmp_path / "adapter_model.safetensors.index.json", index)
    refused(str(tmp_path), "index.json is split into several files, which is not read")


@pytest.mark.parametrize("key", ["r", "lora_alpha", "target_modules", "peft_type"])
@pytest.mark.parametrize("null", [True, False])
def test_required_keys(tmp_path, key, null):
    data = {k: v for k, v in pf.MINIMAL.items() if k != key} | ({key: None} if null else {})
    folder = pf.write_raw(tmp_path / "a", data, pf.keys_of(pf.Q))
    refused(folder, f"adapter_config.json: {key}: is missing")


@pytest.mark.parametrize("kind", ["ADALORA", "LOKR", "lora", 3, ["LORA"]])
def test_other_kinds_of_adapter(tmp_path, kind):
    refused(
        pf.write_minimal(tmp_path, peft_type=kind), "peft_type = .*is a method that is not read"
    )


NAN, INF = float("nan"), float("inf")
BAD_VALUES = [
    ("r", [0, -1, True, 4.0, "4", NAN, [4]]),
    ("lora_alpha", [0, -1.0, True, "8", NAN, INF, -INF, 10**400, [8]]),
    ("target_modules", ["", [], [""], [1], 3, "(", {"q_proj": 1}]),
    ("exclude_modules", [[""], 3, "*"]),
    ("rank_pattern", [[], "q_proj", {"q_proj": 0}, {"q_proj": True}, {"q_proj": 2.5}, {"(": 2}]),
    ("rank_pattern", [{"(?i)q_proj": 4}]),
    ("alpha_pattern", [3, {"q_proj": -1}, {"q_proj": NAN}, {"q_proj": "2"}, {"*": 2}]),
    ("layers_to_transform", ["1", [True], [-1], 1.5, [1, 1]]),
    ("layers_pattern", [[3], ["("], 3]),
    ("use_rslora", [1, "true"]),
    ("use_dora", [0, "false"]),
    ("lora_dropout", [1, -0.1, True, NAN, "0"]),
    ("bias", ["some", 3, [], True]),
    ("init_lora_weights", [3, "unheard-of", ["gaussian"]]),
    ("modules_to_save", ["lm_head", [3], [""]]),
    ("trainable_token_indices", [3, [-1], [True], [1, 1], {"a": 3}, {"a": [1.0]}, {"": [1]}]),
    ("ensure_weight_tying", [1]),
    ("base_model_name_or_path", [3]),
]


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in BAD_VALUES for value in values]
)
def test_values_of_wrong_type(tmp_path, key, value):
    refused(pf.write_minimal(tmp_path, **{key: value}), f"adapter_config.json: {key} = ")


FLAGS = {
    "lora_bias": True,
    "layer_replication": [[0, 2]],
    "megatron_config": {"a": 1},
    "use_qalora": True,
    "alora_invocation_tokens": [1],
    "arrow_config": {"top_k": 2},
    "use_bdlora": {"nblocks": 2},
    "kasa_config": {"beta": 1},
    "monteclora_config": {"num_samples": 2},
    "enable_lora": [True, False],
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_that_change_the_maths_are_refused_by_name(tmp_path, flag):
    refused(pf.write_minimal(tmp_path, **{flag: FLAGS[flag]}), f"{flag} = .*is not supported")


def test_a_number_is_no_unset_flag(tmp_path):
    refused(pf.write_minimal(tmp_path, lora_bias=0), "lora_bias = 0: is not supported")


def test_targets_must_not_be_empty(tmp_path):
    refused(pf.write_minimal(tmp_path, target_modules=[]), "target_modules = ..: is empty")


def test_unset_flags_and_history_are_fine(tmp_path):
    unset = {flag: None if i % 2 else False for i, flag in enumerate(FLAGS)}
    history = {
        "corda_config": {"a": 1},
        "eva_config": {"rho": 2},
        "loftq_config": {},
        "revision": 3,
    }
    history |= {
        "layers_pattern": "",
        "qalora_group_size": 16,
        "megatron_core": "x",
        "task_type": "SEQ_CLS",
    }
    found = peft_files.read(pf.write_minimal(tmp_path, **unset, **history, later_key=None))
    assert found.notes == (
        "keys that are not known are unset: later_key",
        "it does not say which base it belongs to, so that is not checked",
    )


def test_unknown_keys_are_named(tmp_path):
    folder = pf.write_minimal(tmp_path, use_rslorra=True)
    refused(folder, "use_rslorra = True: is a key that is not known; did you mean 'use_rslora'")


def test_keys_without_effect_are_said(tmp_path):
    changes = {"fan_in_fan_out": True, "runtime_config": {"a": 1}, "velora_config": {"b": 1}}
    notes = " ".join(peft_files.read(pf.write_minimal(tmp_path, **changes)).notes)
    for key in changes:
        assert f"{key} is set and has no effect" in notes


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_initialisations_that_change_the_base_are_refused(tmp_path, init):
    """PEFT repeats them when it loads: B A alone, on the plain base, is another model."""
    folder = pf.write_minimal(tmp_path, init_lora_weights=init)
    refused(folder, f"init_lora_weights = '{init}': .*path_initial_model_for_weight_conversion")


@pytest.mark.parametrize(
    ("value", "name"), [(True, "default"), (False, "random"), ("eva", "eva"), ("mica", "mica")]
)
def test_other_initialisations_are_history(tmp_path, value, name):
    found = peft_files.read(pf.write_minimal(tmp_path, init_lora_weights=value))
    assert found.config.init_lora_weights == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ".*q_proj", "layers_to_transform": 1}, "layers_to_transform.*regex"),
        ({"target_modules": ".*q_proj", "layers_pattern": "layers"}, "layers_pattern.*regex"),
        ({"layers_pattern": "layers"}, "layers_pattern.*no effect without layers_to_transform"),
    ],
)
def test_keys_that_peft_does_not_take_together(tmp_path, changes, message):
    refused(pf.write_minimal(tmp_path, **changes), message)


def test_all_problems_come_together(tmp_path):
    def change(tensors):
        tensors[Q_A][0, 0] = NAN
        tensors["base_model.model.x.lora_C"] = pf.draw(2)

    folder = pf.write_minimal(tmp_path, change, r=0, lora_alpha=True, use_qalora=True, new_key=1)
    error = refused(folder, "r = 0")
    where = ("r = 0", "lora_alpha = True", "use_qalora", "new_key", "lora_C", "lora_A: holds NaN")
    assert len(error.problems) == len(where)
    assert all(part in str(error) for part in where)


# ---- tensors against the config ----------------------------------------------------------------


def put(**tensors):
    """Adds tensors to layer 0's q_proj; None removes one."""

    def change(found):
        for end, array in tensors.items():
            key = Q_A.replace("lora_A.weight", end.replace("__", "."))
            found[key] = array
            if array is None:
                del found[key]

    return change


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lora_A__weight": None}, "has lora_B, no lora_A"),
        ({"lora_B__weight": None}, "has lora_A, no lora_B"),
        ({"lora_embedding_A": pf.draw(4, 3)}, "has lora_embedding_A, no lora_embedding_B"),
        ({"lora_A__weight": pf.draw(4)}, r"lora_A = \(4,\): is not a possible shape"),
        ({"lora_A__weight": pf.draw(4, 4, 1, 1)}, "is not a possible shape"),
        ({"lora_A__weight": pf.draw(4, 0)}, "is not a possible shape"),
        ({"lora_A__weight": pf.draw(3, 16)}, "lora_A and lora_B differ in r"),
        (
            {"lora_A__weight": pf.draw(3, 16), "lora_B__weight": pf.draw(16, 3)},
            "r = 4: is the rank of model.layers.0.*by the config, and its tensors have 3",
        ),
        ({"lora_magnitude_vector": pf.draw(4)}, "lora_magnitude_vector does not fit the rows"),
        ({"lora_A__weight": np.full((4, 16), NAN, np.float32)}, "holds NaN or infinity"),
        ({"lora_A__weight": np.full((4, 16), INF, np.float16)}, "holds NaN or infinity"),
        ({"lora_A__weight": np.full((4, 16), -INF, ml_dtypes.bfloat16)}, "holds NaN or inf"),
        ({"lora_A__weight": np.zeros((4, 16), np.int64)}, "'I64': is an element type that is not"),
        ({"lora_A__weight": np.zeros((4, 16), ml_dtypes.float8_e4m3fn)}, "'F8_E4M3': is an elem"),
        ({"lora_magnitude_vector": pf.draw(16)}, "use_dora = False: and .*has a lora_magnitude"),
        ({"weight": pf.draw(16, 16)}, "modules_to_save.*does not name model.layers.0"),
        ({"base_layer__bias": pf.draw(16)}, "bias = 'none': and model.layers.0.*has a bias"),
        (
            {"token_adapter__trainable_tokens_delta": pf.draw(2, 16)},
            "trainable_token_indices = .*: names model.layers.0.*trained rows, 0 times",
        ),
        (
            {"lora_embedding_A": pf.draw(4, 3), "lora_embedding_B": pf.draw(3, 4)},
            "has adapters of two kinds",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, tensors, message):
    refused(pf.write_minimal(tmp_path, put(**tensors)), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_modules": ["k_proj"]},
            "target_modules.*does not name model.layers.0.self_attn.q",
        ),
        ({"target_modules": "q_proj"}, "target_modules = 'q_proj': does not name"),
        ({"target_modules": ".*q_pro"}, "target_modules = '.*q_pro': does not name"),
        ({"target_modules": ["proj"]}, "target_modules = .'proj',.: does not name"),
        ({"exclude_modules": ["q_proj"]}, "target_modules.*does not name"),
        ({"exclude_modules": r".*\.1\..*"}, "does not name model.layers.1.self_attn.q_proj"),
        ({"layers_to_transform": 0}, "does not name model.layers.1.self_attn.q_proj"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "h"}, "does not name model.layers.0"),
        ({"rank_pattern": {"q_proj": 3}}, "r = 3: is the rank of .*its tensors have 4"),
        ({"rank_pattern": {"layers.1.*": 3}}, "rank of model.layers.1.self_attn.q_proj"),
        ({"rank_pattern": {"_proj": 4}}, "rank_pattern = '_proj': fits no module"),
        ({"alpha_pattern": {"v_proj": 4}}, "alpha_pattern = 'v_proj': fits no module"),
        ({"use_dora": True}, "use_dora = True: and .*q_proj has no lora_magnitude_vector"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = 'lm_head': names no module"),
        ({"modules_to_save": ["q_proj"]}, "names model.layers.0.self_attn.q_proj, which has an"),
        ({"trainable_token_indices": [1]}, "'embed_tokens': names no module that has trained rows"),
    ],
)
def test_config_that_names_what_is_not_there(tmp_path, changes, message):
    refused(pf.write_minimal(tmp_path, **changes), message)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dora", {"kind": "lora"}, "use_dora = False"),
        ("save", {"modules_to_save": ("lm_head", "norm")}, "does not name model.embed_tokens"),
        (
            "bias all",
            {"bias": "lora_only"},
            "bias = 'lora_only': and model.layers.0.self_attn.k_pr",
        ),
        ("bias lora_only", {"bias": "none"}, "bias = 'none'"),
        (
            "tokens",
            {"trainable_token_indices": {"embed_tokens": (5,)}},
            "lists 1 tokens of .* 2 row",
        ),
        ("tokens", {"trainable_token_indices": {"model.norm": (5, 3)}}, "0 times"),
        (
            "tokens",
            {"trainable_token_indices": {"embed_tokens": (5, 3), "tokens": (5, 3)}},
            "2 times",
        ),
        ("lora", {"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ("lora", {"r": 0}, "r = 0: is not a positive integer"),
        ("lora", {"target_modules": ()}, "target_modules: is missing"),
    ],
)
def test_writing_refuses_what_reading_would(tmp_path, name, changes, message):
    with pytest.raises(errors.ModelError, match=message):
        peft_files.write(str(tmp_path / "a"), pf.replaced(pf.case(name), **changes))
    assert os.listdir(tmp_path) == []


def test_a_bias_alone_is_no_saved_module(tmp_path):
    key = "base_model.model.model.layers.0.self_attn.k_proj.bias"
    folder = pf.write_minimal(
        tmp_path, lambda tensors: tensors.update({key: pf.draw(8)}), modules_to_save=["k_proj"]
    )
    refused(folder, "modules_to_save = 'k_proj': names no module that has a full weight")


def test_base_weight_without_adapter(tmp_path):
    key = "base_model.model.lm_head.base_layer.weight"
    folder = pf.write_minimal(tmp_path, lambda tensors: tensors.update({key: pf.draw(32, 16)}))
    refused(folder, "lm_head has a base weight and no adapter")


@pytest.mark.parametrize("dtype", [np.float64, np.int8, ml_dtypes.float8_e4m3fn])
def test_writing_refuses_other_element_types(tmp_path, dtype):
    with pytest.raises(errors.ModelError, match="is not one of .* of type F32, F16, BF16"):
        peft_files.write(str(tmp_path / "a"), pf.case("lora", dtype))


def test_only_full_weights_is_no_adapter(tmp_path):
    data = pf.MINIMAL | {"modules_to_save": ["lm_head"]}
    folder = pf.write_raw(
        tmp_path / "a", data, {"base_model.model.lm_head.weight": pf.draw(32, 16)}
    )
    refused(folder, "target_modules = .*finds no adapter")


# ---- the weights file --------------------------------------------------------------------------


@pytest.mark.parametrize(("damage", "message"), model_files.JSON_DAMAGE[-3:])
def test_weights_that_are_no_file(tmp_path, damage, message):
    folder = pf.write_minimal(tmp_path)
    damage(tmp_path / peft_files.WEIGHTS)
    refused(folder, message)


HEADER = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({Q_A: HEADER}, b"\0" * 20),
        ({Q_A: HEADER | {"data_offsets": [0, 20]}}, b"\0" * 24),
        ({Q_A: {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, b"\0" * 24),
        ({Q_A: HEADER, Q_B: HEADER}, b"\0" * 24),
        ([], b""),
    ],
)
def test_header_that_lies(tmp_path, header, data):
    folder = pf.write_minimal(tmp_path)
    model_files_header(tmp_path / peft_files.WEIGHTS, header, data)
    refused(folder, "is not a sound safetensors file")


def model_files_header(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_every_truncation_is_refused(tmp_path):
    folder = pf.write_minimal(tmp_path)
    file = tmp_path / peft_files.WEIGHTS
    data = file.read_bytes()
    for size in [*range(0, len(data), 61), len(data) - 1]:
        file.write_bytes(data[:size])
        refused(folder, "is not a sound safetensors file")


def test_no_tensors(tmp_path):
    refused(pf.write_raw(tmp_path / "a", pf.MINIMAL, {}), "holds no tensors")


def test_bad_config_is_told_with_a_bad_weights_file(tmp_path):
    folder = pf.write_minimal(tmp_path, r=0)
    (tmp_path / peft_files.WEIGHTS).write_bytes(b"")
    assert len(refused(folder, "r = 0").problems) == 2


def test_element_types_are_told_together(tmp_path):
    bad = {"lora_A__weight": np.zeros((4, 16), np.int64), "lora_B__weight": np.zeros((16, 4), "i1")}
    assert len(refused(pf.write_minimal(tmp_path, put(**bad)), "'I64': .*\n.*'I8': ").problems) == 2


def test_notes_on_tensors(tmp_path):
    def notes(name, dtype):
        folder = str(tmp_path / f"{name} {dtype.__name__}")
        peft_files.write(folder, pf.case(name, dtype))
        return list(peft_files.read(folder).notes)

    assert notes("lora", np.float32) == []
    assert notes("lora", np.float16) == ["its tensors are stored as F16"]
    copies = "it holds the base's own weights of lm_head, model.embed_tokens"
    assert notes("embedding and head", np.float32) == [copies]


# ---- rank, alpha and scaling -------------------------------------------------------------------


def test_scaling_is_of_the_module_itself():
    """The figures of PEFT for r=8, alpha=16 with both patterns (peft#3738)."""
    given = pf.config(r=8, lora_alpha=16, rank_pattern={"k_proj": 4}, alpha_pattern={"v_proj": 32})
    found = {m: adapter_config.scaling(given, f"model.layers.0.self_attn.{m}") for m in
             ("q_proj", "k_proj", "v_proj")}  # fmt: skip
    assert found == {"q_proj": 2.0, "k_proj": 4.0, "v_proj": 4.0}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [0, 1]),
        ({"target_modules": ("model.layers.1.self_attn.q_proj",)}, [1]),
        ({"layers_to_transform": (0,)}, [0]),
        ({"layers_to_transform": (0,), "layers_pattern": ("h", "layers")}, [0]),
        ({"layers_to_transform": (0,), "layers_pattern": ("h",)}, []),
        # In PEFT a full name counts in whatever layer it is.
        (
            {
                "target_modules": ("q_proj", "model.layers.1.self_attn.q_proj"),
                "layers_to_transform": (0,),
            },
            [0, 1],
        ),
        ({"exclude_modules": ("layers.0.self_attn.q_proj",)}, [1]),
        ({"exclude_modules": r".*\.1\..*"}, [0]),
        ({"exclude_modules": ("proj", "0")}, [0, 1]),
    ],
)
def test_targets(changes, layers):
    """As PEFT's own function has them; see the reference tests."""
    given = pf.config(**changes)
    names = {i: f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    assert [i for i, name in names.items() if adapter_config.is_target(given, name)] == layers


def test_rslora_scaling():
    given = pf.config(r=16, lora_alpha=16, use_rslora=True, rank_pattern={"k_proj": 4})
    assert adapter_config.scaling(given, "a.q_proj") == 4.0
    assert adapter_config.scaling(given, "a.k_proj") == 16 / math.sqrt(4)


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("q_proj", True),
        ("proj", False),
        ("self_attn.q_proj", True),
        (r"layers\.1\..*", True),
        (r"^model\.layers.*", True),
        ("^layers.*", False),
        ("model.layers.1.self_attn", False),
        (r".*\.(q|k)_proj", True),
        ("q_pro", False),
    ],
)
def test_pattern_keys_are_regexes_for_dotted_ends(pattern, fits):
    found = targets.pattern_key([pattern], "model.layers.1.self_attn.q_proj")
    assert (found == pattern) is fits


def test_two_alpha_patterns_for_one_module_are_said(tmp_path):
    folder = pf.write_minimal(tmp_path, alpha_pattern={"q_proj": 3, "layers.0.*": 5})
    found = peft_files.read(folder)
    assert any("alpha_pattern fits" in note for note in found.notes)
    assert adapter_config.alpha(found.config, "model.layers.0.self_attn.q_proj") == 3


# ---- names of another wrapping -----------------------------------------------------------------


def renamed(adapter, old, new):
    modules = {
        new + name.removeprefix(old) if name.startswith(old) else name: kinds
        for name, kinds in adapter.modules.items()
    }
    return dataclasses.replace(adapter, modules=modules)


def test_names_of_the_base_stay():
    adapter = pf.case("patterns")
    assert artefact.place(adapter, pf.NAMES) is adapter


@pytest.mark.parametrize("inner", ["", "language_model.", "model.language_model."])
@pytest.mark.parametrize("name", ["patterns", "save", "tokens of both", "embedding and head"])
def test_one_level_of_difference(inner, name):
    wanted = pf.case(name)
    given = renamed(wanted, "model.", inner)
    found = artefact.place(given, pf.NAMES)
    pf.assert_same_modules(found.modules, wanted.modules)
    assert "and so on" in found.notes[-1]
    for module, kinds in wanted.modules.items():
        if "lora_A" in kinds:
            assert adapter_config.is_target(found.config, module)
            old = inner + module.removeprefix("model.")
            for rule in (adapter_config.rank, adapter_config.scaling):
                assert rule(found.config, module) == rule(given.config, old)


def test_placed_patterns_keep_their_meaning(tmp_path):
    """The alpha pattern is anchored at the names of the inner model, which the base has not."""
    given = renamed(pf.case("patterns"), "model.", "")
    given = pf.replaced(given, alpha_pattern={r"^layers\.0.*\.v_proj": 32.0})
    assert adapter_config.alpha(given.config, "layers.0.self_attn.v_proj") == 32
    found = artefact.place(given, pf.NAMES)
    assert adapter_config.alpha(found.config, "model.layers.0.self_attn.v_proj") == 32
    assert adapter_config.alpha(found.config, "model.layers.1.self_attn.v_proj") == 8
    peft_files.write(str(tmp_path / "a"), found)
    pf.assert_same(peft_files.read(str(tmp_path / "a")), found)


def test_placed_rows_and_full_weights_are_named_anew(tmp_path):
    for name in ("save", "tokens of both"):
        found = artefact.place(renamed(pf.case(name), "model.", ""), pf.NAMES)
        peft_files.write(str(tmp_path / name), found)
        pf.assert_same(peft_files.read(str(tmp_path / name)), found)


def test_multimodal_base_takes_an_adapter_of_its_text_model():
    names = [name.replace("model.", "model.language_model.", 1) for name in pf.NAMES]
    found = artefact.place(pf.case("embedding and head"), names)
    assert set(found.modules) == {"model.language_model.embed_tokens", "lm_head"}


def test_surplus_modules_are_all_named_with_near_ones():
    adapter = pf.case("lora")
    modules = {name.replace("q_proj", "qq_proj"): kinds for name, kinds in adapter.modules.items()}
    with pytest.raises(errors.ModelError) as caught:
        artefact.place(dataclasses.replace(adapter, modules=modules), pf.NAMES)
    assert len(caught.value.problems) == 2
    assert "did you mean 'model.layers.0.self_attn.q_proj'" in str(caught.value)
    with pytest.raises(errors.ModelError, match="lm_head: is no module of the base"):
        artefact.place(pf.case("save"), [name for name in pf.NAMES if name != "lm_head"])


def test_two_levels_at_once_are_refused():
    adapter = pf.case("lora")
    inner = {name.replace("model.layers.0", "layers.0"): k for name, k in adapter.modules.items()}
    mixed = {
        name.replace("model.layers.1", "language_model.layers.1"): k for name, k in inner.items()
    }
    with pytest.raises(errors.ModelError, match="is no module of the base"):
        artefact.place(dataclasses.replace(adapter, modules=mixed), pf.NAMES)
    both = adapter.modules | {name.removeprefix("model."): k for name, k in adapter.modules.items()}
    with pytest.raises(errors.ModelError, match="is no module of the base"):
        artefact.place(dataclasses.replace(adapter, modules=both), pf.NAMES)


# ---- writing folders ---------------------------------------------------------------------------


def test_existing_folders_are_not_touched(tmp_path):
    peft_files.write(str(tmp_path / "a"), pf.case("lora"))
    before = (tmp_path / "a" / peft_files.WEIGHTS).read_bytes()
    with pytest.raises(errors.ModelError, match="a: exists, and nothing is overwritten"):
        peft_files.write(str(tmp_path / "a"), pf.case("dora"))
    assert (tmp_path / "a" / peft_files.WEIGHTS).read_bytes() == before
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(errors.ModelError, match="exists"):
        peft_files.write(str(tmp_path / "file"), pf.case("lora"))
    with pytest.raises(errors.ModelError, match="file/a: cannot be written"):
        peft_files.write(str(tmp_path / "file" / "a"), pf.case("lora"))
    (tmp_path / "empty").mkdir()
    peft_files.write(str(tmp_path / "empty"), pf.case("lora"))
    peft_files.write(str(tmp_path / "new" / "parents" / "a") + "/", pf.case("lora"))
    peft_files.read(str(tmp_path / "new" / "parents" / "a"))


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    write_file = safetensors_file.write_file

    def fail(path, tensors, metadata):
        write_file(path, tensors, metadata)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_file, "write_file", fail)
    with pytest.raises(errors.ModelError, match="cannot be written .No space left on device"):
        peft_files.write(str(tmp_path / "a"), pf.case("lora"))
    assert os.listdir(tmp_path) == []


def test_written_folder_has_the_usual_permissions(tmp_path):
    (tmp_path / "usual").mkdir()
    peft_files.write(str(tmp_path / "a"), pf.case("lora"))
    modes = {stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("a", "usual")}
    assert len(modes) == 1


# ---- whatever may come -------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=4,
)
KEYS = st.sampled_from([*config_keys.PARSERS, *FLAGS, "other"])


@hypothesis.given(changes=st.dictionaries(KEYS, JSON, max_size=4))
@hypothesis.settings(max_examples=200, deadline=None)
def test_any_config_is_read_or_refused(tmp_path_factory, changes):
    folder = pf.write_minimal(tmp_path_factory.mktemp("a"), **changes)
    try:
        found = peft_files.read(folder)
    except errors.ModelError as error:
        assert error.problems
    else:
        assert found.config.r == 4
        assert all(isinstance(note, str) for note in found.notes)


PARTS = st.sampled_from(
    ["base_model", "model", "layers", "0", "q_proj", "lora_A", "lora_B", "default", "weight",
     "bias", "base_layer", "modules_to_save", "token_adapter", "lora_magnitude_vector", "", "é"]
)  # fmt: skip


@hypothesis.given(parts=st.lists(PARTS, min_size=1, max_size=8))
@hypothesis.settings(max_examples=200, deadline=None)
def test_any_further_key_is_refused(tmp_path_factory, parts):
    key = ".".join(parts)
    hypothesis.assume(key not in pf.keys_of(pf.Q))
    folder = pf.write_minimal(
        tmp_path_factory.mktemp("a"), lambda tensors: tensors.update({key: pf.draw(4, 16)})
    )
    with pytest.raises(errors.ModelError):
        peft_files.read(folder)
