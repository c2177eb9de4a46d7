"""What a run's folder tells of itself: its story, and the adapter of its last step."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from purelora.core import errors
from purelora.interop.peft import adapter_sources, artefact
from purelora.interop.peft import files as peft_files
from purelora.training import run_folder
from tests.support import runs

NO_EVAL = "--config.data.eval_fraction=0"
OPTIONS = ("--config.optim.schedule=constant", NO_EVAL)


def _run(workdir: pathlib.Path, steps: int) -> int:
    return runs.run(workdir, f"--config.steps={steps}", *OPTIONS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
    """A run of 2 steps, continued to 4; its adapter of step 2 is kept beside it."""
    folder = tmp_path_factory.mktemp("finished")
    assert _run(folder / "run", 2) == 0
    shutil.copytree(folder / "run" / "adapter", folder / "of step 2")
    assert _run(folder / "run", 4) == 0
    return folder


@pytest.fixture
def workdir(finished, tmp_path) -> pathlib.Path:
    return shutil.copytree(finished / "run", tmp_path / "run")


def _holds_step_4(workdir: pathlib.Path) -> bool:
    found, wanted = (
        peft_files.read(str(workdir / "adapter")),
        adapter_sources.open_adapter(str(workdir)),
    )
    artefact.check_equal(found, wanted)
    assert sorted(path.name for path in workdir.glob("*adapter*")) == ["adapter"]
    return "up to step 4" in (workdir / "adapter" / run_folder.CARD).read_text()


def _stale(finished: pathlib.Path, adapter: pathlib.Path) -> None:
    shutil.rmtree(adapter)
    shutil.copytree(finished / "of step 2", adapter)


def _gone(finished: pathlib.Path, adapter: pathlib.Path) -> None:
    shutil.rmtree(adapter)


def _half_removed(finished: pathlib.Path, adapter: pathlib.Path) -> None:
    old = adapter.rename(adapter.with_name("adapter.old"))
    (old / peft_files.WEIGHTS).unlink()


def _not_yet_in_place(finished: pathlib.Path, adapter: pathlib.Path) -> None:
    adapter.rename(adapter.with_name("adapter.new"))


@pytest.mark.parametrize("left", [_stale, _gone, _half_removed, _not_yet_in_place])
def test_a_run_killed_after_its_last_save_gets_its_adapter_at_the_next_start(
    finished, workdir, left, capsys
):
    left(finished, workdir / "adapter")
    assert _run(workdir, 4) == 0
    assert "complete: " in capsys.readouterr().out
    assert _holds_step_4(workdir)


def test_an_adapter_that_is_there_is_left_alone(workdir, capsys):
    card = workdir / "adapter" / run_folder.CARD
    card.write_text(card.read_text() + "\nWords of its user.\n")
    before = (workdir / "adapter").stat().st_mtime_ns
    assert _run(workdir, 4) == 0
    assert "its adapter" not in capsys.readouterr().out
    assert (workdir / "adapter").stat().st_mtime_ns == before
    assert "Words of its user." in card.read_text()


def test_an_adapter_that_cannot_be_written_leaves_the_one_before(finished, workdir, monkeypatch):
    _stale(finished, workdir / "adapter")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(run_folder, "write_adapter", full)
    with pytest.raises(errors.ModelError, match="adapter: cannot be written: no space left"):
        _run(workdir, 4)
    found = peft_files.read(str(workdir / "adapter"))
    wanted = peft_files.read(str(finished / "of step 2"))
    for name, kinds in wanted.modules.items():
        for kind, array in kinds.items():
            np.testing.assert_array_equal(found.modules[name][kind], array)


def test_every_start_has_an_entry(finished):
    entries = json.loads((finished / "run" / run_folder.RECORD).read_text())
    assert [entry["first_step"] for entry in entries] == [0, 2]
    assert not (finished / "run" / "run.json.old").exists()


@pytest.mark.parametrize("text", ["[{", "{}", "\x80"])
def test_a_damaged_story_is_set_aside_and_named(workdir, text, capsys):
    (workdir / run_folder.RECORD).write_bytes(text.encode("latin-1"))
    assert _run(workdir, 5) == 0
    assert f"{workdir / run_folder.RECORD}: is damaged" in capsys.readouterr().out
    assert (workdir / "run.json.old").read_bytes() == text.encode("latin-1")
    entries = json.loads((workdir / run_folder.RECORD).read_text())
    assert [entry["first_step"] for entry in entries] == [4]
