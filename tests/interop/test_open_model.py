"""Runs as models: what they can be the base of, and why not of others."""

import pytest

from purelora.core import errors
from tests.support import runs

NO_EVAL = "--config.data.eval_fraction=0"
SAVED = ("--config.steps=1", NO_EVAL, "--config.checkpoint.save_base=True")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("lora.modules_to_save=norm", r"that were trained whole \(norm\.weight\)"),
        ("lora.init_lora_weights=olora", r"adapters were taken out of \(olora\)"),
    ],
)
def test_a_base_that_is_not_whole_is_refused_with_the_reason(tmp_path, option, message):
    assert runs.run(tmp_path / "one", f"--config.{option}", *SAVED) == 0
    on_top = (f"--config.model.path={tmp_path / 'one'}", "--config.steps=1", NO_EVAL)
    with pytest.raises(errors.CheckpointError, match=message) as caught:
        runs.run(tmp_path / "two", *on_top)
    assert "set model.path=tiny" in str(caught.value)
    assert not (tmp_path / "two").exists()


def test_the_remedy_works(tmp_path):
    option = "--config.lora.modules_to_save=norm"
    assert runs.run(tmp_path / "one", option, *SAVED) == 0
    warm = (option, f"--config.init_adapter={tmp_path / 'one'}", "--config.steps=1", NO_EVAL)
    assert runs.run(tmp_path / "two", *warm) == 0


def test_a_run_without_its_base_is_refused_with_the_remedy(tmp_path):
    assert runs.run(tmp_path / "one", "--config.steps=1", NO_EVAL) == 0
    with pytest.raises(errors.CheckpointError, match="holds adapters without their base; set"):
        runs.run(tmp_path / "two", f"--config.model.path={tmp_path / 'one'}", NO_EVAL)
