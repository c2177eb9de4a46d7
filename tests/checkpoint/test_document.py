"""The JSON document of a step: its sections, and documents of older versions."""

import json
import pathlib
import shutil

import chex
import pytest

from purelora.checkpoint import compatibility, document, manifest
from purelora.config import from_dict, schema
from tests.support.runs import run, saved_leaves

# `meta/metadata` of a run of configs/tiny.py with four steps, by the last version of format 2.
OLD = pathlib.Path(__file__).parent / "files" / "format_2.json"
STEPS = ("--config.optim.schedule_steps=4", "--config.checkpoint.save_steps=2")


def old() -> dict:
    return json.loads(OLD.read_text("utf-8"))


def test_settings_facts_and_progress_are_sections():
    meta = document.from_json(old())
    written = document.to_json(meta)
    assert list(written) == ["format", "settings", "facts", "progress"]
    assert written["settings"].keys() == schema.KEYS.keys() - schema.LATER_KEYS.keys()
    assert written["facts"].keys() == document.FACTS
    assert written["progress"] == {"step": 4, "eval_loss": meta["eval_loss"]}
    assert document.from_json(written) == meta
    names = [*written["settings"], *written["facts"], *written["progress"]]
    assert not any(" " in name for name in names)


def test_an_older_document_loses_nothing():
    meta, before = document.from_json(old()), old()
    sizes = {f"{document.SIZE}{name}": v for name, v in meta.pop("model_sizes").items()}
    path = f"{document.SCALINGS}"
    scalings = {f"{path}{name}": v for name, v in meta.pop("adapter_scalings").items()}
    assert sizes and scalings
    assert before == {**meta, "config": meta["config"] | sizes | scalings, "format": 2}
    assert from_dict.from_flat(meta["config"]).lora.r == 4


def test_older_and_present_documents_of_a_run_fit_each_other():
    meta = document.from_json(old())
    now = {**meta, "config": {**meta["config"], **schema.LATER_KEYS}}
    assert not compatibility.setting_problems(meta, now, ())
    now["model_sizes"] = {**meta["model_sizes"], "vocab_size": 3}
    module = min(meta["adapter_scalings"])
    now["adapter_scalings"] = {**meta["adapter_scalings"], module: [[1], [1.0]]}
    texts = [str(p) for p in compatibility.setting_problems(meta, now, ())]
    assert [text.partition(" = ")[0] for text in texts] == [
        "config.json: vocab_size",
        f"lora: ranks and scalings of {module}",
    ]


def _as_format_2(written: dict) -> dict:
    """What the last version of format 2 would have written."""
    meta = document.from_json(written)
    sizes = {f"config.json: {name}": v for name, v in meta.pop("model_sizes").items()}
    scalings = {
        f"lora: ranks and scalings of {path}": v for path, v in meta.pop("adapter_scalings").items()
    }
    config = {k: v for k, v in meta["config"].items() if k not in schema.LATER_KEYS}
    return {"format": 2, **meta, "config": {**config, **sizes, **scalings}}


def test_a_run_with_checkpoints_of_an_older_version_is_resumed(tmp_path):
    unbroken, older = tmp_path / "unbroken", tmp_path / "older"
    run(unbroken, "--config.steps=4", *STEPS)
    run(older, "--config.steps=2", *STEPS)
    step = older / "checkpoints" / "2"
    file = step / "meta" / "metadata"
    before = _as_format_2(json.loads(file.read_text("utf-8")))
    assert before.keys() == old().keys()
    assert before["config"].keys() == old()["config"].keys()
    file.write_text(json.dumps(before))
    (step / manifest.NAME).unlink()
    manifest.write(step)

    unfinished = older / "checkpoints" / "3"
    shutil.copytree(step, unfinished)
    (unfinished / manifest.NAME).unlink()
    run(older, "--config.steps=4", *STEPS)
    assert (
        json.loads((older / "checkpoints" / "4" / "meta" / "metadata").read_text())["format"] == 3
    )
    chex.assert_trees_all_equal(*[saved_leaves(w, 4) for w in (unbroken, older)])


@pytest.mark.parametrize("damaged", [{"format": 3}, {"format": 2}, {"format": 3, "settings": None}])
def test_a_document_without_its_sections_is_no_document(damaged):
    with pytest.raises((LookupError, TypeError)):
        document.from_json(damaged)
