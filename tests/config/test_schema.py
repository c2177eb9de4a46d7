"""Configuration: every wrong key, type, value and combination, with its key, value and a remedy."""

import math
import pathlib
from typing import Any

import pytest

from configs import base
from purelora.config import document, foreign_keys, from_dict, key_types, schema
from purelora.core import errors

TYPES = schema.field_types()
NUMBERS = [k for k, t in TYPES.items() if t in (int, float, int | None, float | None)]


def raw(**changes: Any) -> dict[str, Any]:
    """A good config as nested dicts, with `changes` by dotted key (`lora__r` for `lora.r`)."""
    nested = base.get_config().to_dict()
    nested["model"]["path"], nested["steps"] = "tiny", 10
    return with_keys(nested, {key.replace("__", "."): value for key, value in changes.items()})


def with_keys(nested: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        *sections, leaf = key.split(".")
        node = nested
        for section in sections:
            node = node[section]
        node[leaf] = value
    return nested


def problems(nested: dict[str, Any]) -> list[errors.Problem]:
    with pytest.raises(errors.ConfigError) as caught:
        from_dict.parse(nested)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    return list(caught.value.problems)


def test_a_good_config():
    c = from_dict.parse(raw(lora__target_modules=["q_proj", "v_proj"], lora__lora_alpha=16))
    assert (c.lora.r, c.steps, c.model.path) == (16, 10, "tiny")
    assert c.lora.target_modules == ("q_proj", "v_proj")
    assert type(c.lora.lora_alpha) is float
    assert set(schema.as_flat(c)) == set(TYPES)
    assert schema.as_flat(c)["lora.r"] == 16
    assert from_dict.parse(raw(batch_size=12, accum_steps=4)).micro_batch_size == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 1}, "max_length = 1: must be from 2 to 16777216"),
        ({"seed": 2**32}, "seed = 4294967296: must be from 0 to 4294967295"),
        ({"workdir": ""}, "workdir = '': is empty; name the folder that the run writes to"),
        ({"model__path": ""}, "model.path = '': is empty; name a model, a folder or a file"),
        ({"lora__lora_dropout": 1.0}, "lora.lora_dropout = 1.0: must be at least 0 and below 1"),
        ({"data__eval_fraction": 1}, "data.eval_fraction = 1.0: must be at least 0 and below 1"),
        ({"data__chat_template_kwargs": {"tools": True}},
         "data.chat_template_kwargs = 'tools': is what the template is given for each"),
        ({"data__template_date": "1.2.26"},
         "data.template_date = '1.2.26': is not a date; write it as 2026-01-31"),
        ({"optim__b1": 1.0}, "optim.b1 = 1.0: must be at least 0 and below 1"),
        ({"optim__b2": 1.0}, "optim.b2 = 1.0: must be at least 0 and below 1"),
        ({"optim__momentum": math.nan, "optim__name": "sgd"}, "optim.momentum = nan: must be at"),
        ({"optim__min_lr_ratio": 1.5}, "optim.min_lr_ratio = 1.5: must be from 0 to 1"),
        ({"optim__learning_rate": 0}, "optim.learning_rate = 0.0: must be a float32 above 0"),
        ({"optim__learning_rate": math.nan}, "optim.learning_rate = nan: must be a float32"),
        ({"optim__eps": math.inf}, "optim.eps = inf: must be a float32 above 0"),
        ({"optim__clip_norm": 0.0}, "optim.clip_norm = 0.0: must be a float32 above 0"),
        ({"optim__weight_decay": math.nan}, "optim.weight_decay = nan: must be at least 0"),
        ({"quant__skip": ["("]}, "quant.skip = '(': is not a regular expression: missing"),
        ({"steps": None}, "steps, epochs = (None, None): are both None; set exactly one of them"),
        ({"epochs": 2}, "steps, epochs = (10, 2): are both set; set exactly one of them"),
        ({"batch_size": 10, "accum_steps": 4},
         "batch_size = 10: is not a multiple of accum_steps = 4; use 8 or 12"),
        ({"batch_size": 2, "accum_steps": 4},
         "batch_size = 2: is not a multiple of accum_steps = 4; use 4"),
        ({"lora__r": 0}, "lora.r = 0: must be from 1 to 65536; 8 and 16 are usual"),
        ({"lora__lora_alpha": 0}, "lora.lora_alpha = 0.0: makes the scaling alpha / r zero or not"),
        ({"lora__lora_alpha": math.nan}, "lora.lora_alpha = nan: makes the scaling"),
        ({"lora__target_modules": []},
         "lora.target_modules = (): is empty; use 'all-linear', a list of module names or a regex"),
        ({"lora__target_modules": ""}, "lora.target_modules = '': is empty; use 'all-linear'"),
        ({"lora__enabled": False, "quant__qtype": "int8"},
         "quant.qtype = 'int8': quantises the base, but lora.enabled=False trains it; set quant."),
        ({"lora__enabled": False, "model__weights_dtype": "bfloat16"},
         "model.weights_dtype = 'bfloat16': would train all weights in less than float32"),
        ({"mesh__keep_gathered": True, "remat": "full"},
         "mesh.keep_gathered = True: has no effect with remat='full', which gathers with what it"),
        ({"mesh__keep_gathered": True, "lora__enabled": False},
         "mesh.keep_gathered = True: has no effect with lora.enabled=False: there is no frozen"),
        ({"mesh__shard_adapters": True, "lora__enabled": False},
         "mesh.shard_adapters = True: has no effect with lora.enabled=False: there are no adap"),
        ({"quant__tile_size": 32},
         "quant.tile_size = 32: has no effect with quant.qtype='none'; set quant.qtype='int8', or"),
        ({"data__eval": "x.jsonl", "data__eval_fraction": 0.1},
         "data.eval_fraction = 0.1: and data.eval are both set; set data.eval_fraction=0, or"),
        ({"eval_steps": 5},
         "eval_steps = 5: is set, but there is no eval data; set data.eval or data.eval_fraction"),
        ({"optim__momentum": 0.9},
         "optim.momentum = 0.9: has no effect with optim.name='adamw'; set it to 0, or use opt"),
        ({"optim__warmup_steps": 11}, "optim.warmup_steps = 11: is more than the 10 steps there"),
        ({"optim__warmup_steps": 9, "optim__schedule_steps": 8},
         "optim.warmup_steps = 9: is more than the 8 steps there are"),
    ],
)  # fmt: skip
def test_wrong_value(changes, message):
    found = problems(raw(**changes))
    assert len(found) == 1
    assert str(found[0]).startswith(message)


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_a_lower_bound(key):
    """A new key without a check fails here."""
    found = problems(with_keys(raw(), {key: -1}))
    value = "-1.0" if TYPES[key] in (float, float | None) else "-1"
    assert any(str(p).startswith(f"{key} = {value}: m") for p in found)


@pytest.mark.parametrize(
    "key", [k for k in NUMBERS if TYPES[k] in (int, int | None) and k not in
            ("seed", "optim.warmup_steps")]
)  # fmt: skip
def test_every_count_refuses_zero(key):
    assert any(p.where == key for p in problems(with_keys(raw(), {key: 0})))


@pytest.mark.parametrize("key", TYPES)
def test_every_key_has_a_type(key):
    found = problems(with_keys(raw(), {key: object()}))
    assert [p.where for p in found] == [key]
    assert found[0].what == f"must be {key_types.describe(TYPES[key])}"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lora.r", "8", "lora.r = '8': must be a whole number"),
        ("lora.r", 8.0, "lora.r = 8.0: must be a whole number"),
        ("lora.r", True, "lora.r = True: must be a whole number"),
        ("lora.r", None, "lora.r: must be a whole number"),
        ("optim.learning_rate", "1e-4", "must be a number"),
        ("optim.learning_rate", False, "must be a number"),
        ("data.packing", 1, "data.packing = 1: must be True or False"),
        ("dtype", "fp16", "dtype = 'fp16': must be one of 'float32', 'bfloat16'"),
        ("quant.qtype", "int3", "quant.qtype = 'int3': must be one of 'none', 'int8'"),
        ("quant.tile_size", "32", "must be a whole number or None"),
        ("lora.target_modules", ["q_proj", 3], "must be a string or a list of strings"),
        ("quant.skip", "embed_tokens", "quant.skip = 'embed_tokens': must be a list of strings"),
        ("data.eval", 3, "must be a string or None"),
        ("lora", 3, "lora = 3: must be a section of keys"),
    ],
)
def test_wrong_type(key, value, message):
    (found,) = problems(with_keys(raw(), {key: value}))
    assert message in str(found)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("lora.rr", "lora.rr: is not a key of purelora; did you mean lora.r"),
        ("lora.target_module", "did you mean lora.target_modules"),
        ("learning_rat", "did you mean optim.learning_rate"),
        ("optim.steps", "did you mean steps"),
        ("quant.lora_dropout", "did you mean lora.lora_dropout"),
        ("zzz", "zzz: is not a key of purelora; configs/base.py names every key"),
    ],
)
def test_unknown_key(key, message):
    (found,) = problems(with_keys(raw(), {key: 1}))
    assert message in str(found)


@pytest.mark.parametrize("key", foreign_keys.FOREIGN_KEYS)
def test_foreign_keys_are_answered(key):
    """Each names a key that exists, or says that there is none."""
    section = key.rpartition(".")[0]
    nested = raw() if not section or section in base.get_config() else {**raw(), section: {}}
    found = [p for p in problems(with_keys(nested, {key: 1})) if p.where == key]
    answer = foreign_keys.FOREIGN_KEYS[key]
    is_key = answer.split()[0] in TYPES
    assert is_key or answer.startswith("no key: ")
    assert [p.remedy for p in found] == [f"use {answer}" if is_key else answer]
    assert key not in TYPES


def test_missing_keys_are_all_named():
    nested = raw()
    del nested["steps"], nested["lora"]["r"], nested["optim"]
    found = problems(nested)
    assert [p.where for p in found] == ["steps", "lora.r", "optim"]
    assert all("is missing; start the config from configs/base.py" in str(p) for p in found)


def test_problems_of_all_kinds_come_together():
    wrong = {"lora.rr": 1, "batch_size": "8", "dtype": "fp8"}
    assert {p.where for p in problems(with_keys(raw(), wrong))} == set(wrong)
    ranges = {"max_length": 0, "optim.b1": 2.0, "lora.r": -3}
    found = problems(with_keys(raw(), ranges))
    assert {p.where for p in found} == set(ranges)


def test_long_values_are_cut():
    (found,) = problems(raw(lora__r="8" * 1000))
    assert len(str(found)) < 300 and "…" in str(found)


def test_the_document_is_written_from_the_declarations():
    """To write it: python -m purelora.config.document > configs/base.py"""
    assert pathlib.Path(base.__file__).read_text("utf-8") == document.text()
    flat = {}
    for key, value in base.get_config().to_dict().items():
        nested = value if isinstance(value, dict) else None
        flat |= {f"{key}.{k}": v for k, v in nested.items()} if nested else {key: value}
    assert flat == {path: it.default for path, it in schema.KEYS.items()}
    assert flat == schema.as_flat(schema.Config())


def test_what_may_change_when_a_run_goes_on():
    fixed = [path for path in schema.KEYS if path not in schema.RESUMABLE]
    assert {path.first for path in schema.RESUMABLE if "." in path} == {
        "model",
        "data",
        "mesh",
        "checkpoint",
    }
    assert "seed" in fixed and "lora.r" in fixed and "optim.learning_rate" in fixed


def test_other_names_are_told_once():
    names = [name for it in schema.KEYS.values() for name in it.key.other_names]
    assert len(set(names)) == len(names) > 60


@pytest.mark.parametrize(
    ("name", "known", "remedy"),
    [
        ("q_pro", ["q_proj", "k_proj"], "did you mean 'q_proj' or 'k_proj'?"),
        ("zzz", ["b", "a"], "known: a, b"),
    ],
)
def test_nearest(name, known, remedy):
    assert errors.nearest(name, known) == remedy


def test_errors_of_one_and_of_many_problems():
    one = errors.DataError("a.jsonl:7", {"x": 1}, "is wrong", "fix it")
    assert str(one) == "a.jsonl:7 = {'x': 1}: is wrong; fix it"
    two = errors.ModelError.of([one.problems[0], errors.Problem("b", None, "is missing", "")])
    assert str(two) == f"{one}\nb: is missing"
    assert isinstance(two, errors.UserError) and len(two.problems) == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("use_rslora", True),
        ("init_lora_weights", "pissa"),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2.0}),
        ("lora_dropout", 0.5),
        ("modules_to_save", ("lm_head",)),
        ("trainable_token_indices", (1,)),
        ("bias", "all"),
        ("layers_to_transform", (0,)),
        ("exclude_modules", ("q_proj",)),
    ],
)
def test_keys_of_adapters_have_no_effect_without_them(key, value):
    nested = raw()
    nested["lora"] |= {"enabled": False, key: value}
    message = rf"lora\.{key} = .*has no effect with lora.enabled"
    with pytest.raises(errors.ConfigError, match=message):
        from_dict.parse(nested)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("r", 2**40, r"lora\.r = 1099511627776: must be from 1 to 65536"),
        ("rank_pattern", {"q_proj": 2**40}, r"rank_pattern\['q_proj'\] = 1099511627776: must"),
        ("alpha_pattern", {"q_proj": 10**400}, r"alpha_pattern\['q_proj'\].*must be above 0"),
        ("layers_to_transform", (1, 1), r"layers_to_transform = 1: is listed twice"),
        ("layers_to_transform", (-1,), r"layers_to_transform = -1: is not the number of a layer"),
        ("layers_to_transform", (), r"layers_to_transform = \(\): names no layer"),
        ("trainable_token_indices", (3, 3), r"trainable_token_indices = 3: is listed twice"),
    ],
)
def test_adapter_settings_out_of_range(key, value, message):
    nested = raw()
    nested["lora"] |= {key: value}
    with pytest.raises(errors.ConfigError, match=message):
        from_dict.parse(nested)
