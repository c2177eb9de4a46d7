"""Damaged checkpoints, full disks and second writers: found, named, and never trained on."""

import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purelora.checkpoint import manifest, retention, store
from purelora.commands import train
from purelora.core import errors, train_state

REPO = pathlib.Path(__file__).parents[2]
TINY = f"--config={REPO}/configs/tiny.py"
ENV = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
OPTIONS = ("--config.optim.schedule=constant", "--config.data.eval_fraction=0",
           "--config.accum_steps=1", "--config.max_length=64",
           "--config.checkpoint.save_first=False")  # fmt: skip
KEEP = retention.Policy(last=3, every=None, best=False)


def _state(step: int) -> train_state.TrainState:
    tree = {"w": jax.random.normal(jax.random.key(step), (16, 64))}
    return train_state.TrainState(tree, tree, jnp.int32(step), jnp.int32(0), jax.random.key(7))


def _like(tree: train_state.TrainState) -> train_state.TrainState:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Whole steps 5 and 10, 10 with a base."""
    opened = store.Checkpoints(tmp_path / "run", KEEP, in_background=False)
    opened.save(5, _state(5), {"config": {}})
    opened.save(10, _state(10), {"config": {}}, {"base": {"w": jnp.arange(5).astype(jnp.uint8)}})
    opened.close()
    return tmp_path / "run"


def _opened(folder: pathlib.Path) -> store.Checkpoints:
    return store.Checkpoints(folder, KEEP, in_background=False)


def _damages(file: pathlib.Path) -> Iterator[Callable[[], object]]:
    """Ways to damage a file: gone, empty, cut short, grown, and one bit flipped in some bytes."""
    data = file.read_bytes()
    yield file.unlink
    for other in (b"", data[:-1], data[: len(data) // 2], data + b"\0"):
        if other != data:
            yield lambda other=other: file.write_bytes(other)
    draw = random.Random(file.name)
    for place in {0, len(data) - 1, *(draw.randrange(len(data)) for _ in range(8))}:
        flipped = bytearray(data)
        flipped[place] ^= 1 << draw.randrange(8)
        yield lambda flipped=bytes(flipped): file.write_bytes(flipped)


def test_damage_to_any_file_is_found_before_anything_is_read(folder, tmp_path, capfd):
    whole = shutil.copytree(folder / "10", tmp_path / "whole")
    files = [file.relative_to(whole) for file in whole.rglob("*") if file.is_file()]
    assert len(files) > 10
    for name in files:
        for damage in _damages(folder / "10" / name):
            damage()
            opened = _opened(folder)
            newest = opened.newest_whole()
            assert newest.step == 5, name
            assert [passed.problem.where for passed in newest.passed_over] == [str(folder / "10")]
            # Without its manifest a step is like one whose save was killed.
            is_gone = not (folder / "10" / manifest.NAME).exists()
            assert newest.passed_over[0].is_damage != is_gone
            for read in (
                lambda opened=opened: opened.restore(10, _like(_state(10))),
                lambda opened=opened: opened.leaves(10, "base"),
                lambda opened=opened: opened.meta(10),
            ):
                with pytest.raises(errors.CheckpointError, match="10: is (damaged|not a complete)"):
                    read()
            (folder / "10" / name).write_bytes((whole / name).read_bytes())
    assert _opened(folder).newest_whole().step == 10
    assert capfd.readouterr() == ("", "")


def test_every_seventh_byte_of_a_manifest_counts(folder):
    path = folder / "10" / manifest.NAME
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        assert manifest.damage(folder / "10"), data[place - 9 : place + 9]


@pytest.mark.parametrize("name", ["manifest.json", "meta/metadata", "state/manifest.ocdbt"])
def test_a_damaged_step_is_replaced_by_a_save_and_kept_out_of_the_policy(folder, name):
    (folder / "10" / name).write_text("{}")
    opened = store.Checkpoints(
        folder, retention.Policy(last=2, every=None, best=False), in_background=False
    )
    assert opened.newest_whole().step == 5
    opened.save(8, _state(8), {"config": {}})
    assert (folder / "5").exists(), "the damaged step took the place of a whole one"
    opened.save(10, _state(10), {"config": {}})
    assert opened.steps() == [8, 10]
    restored = opened.restore(10, _like(_state(10)))
    np.testing.assert_array_equal(restored.trainable["w"], _state(10).trainable["w"])


def test_files_that_were_not_saved_do_no_harm(folder):
    (folder / "10" / ".DS_Store").write_text("a file manager's")
    assert _opened(folder).newest_whole() == (10, ())


def test_damage_after_it_was_verified_is_found_too(folder):
    opened = _opened(folder)
    assert opened.newest_whole().step == 10
    file = max((folder / "10").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(errors.CheckpointError, match="has not the checksum"):
        opened.restore(10, _like(_state(10)))


def test_a_killed_save_between_the_arrays_and_the_manifest(folder, monkeypatch):
    """Orbax has renamed its folder, but the step does not count before its manifest is there."""
    seen = []
    write = manifest.write

    def killed(path):
        seen.append(_opened(folder).newest_whole())
        shutil.copytree(path, folder.parent / "copy")
        write(path)

    monkeypatch.setattr(manifest, "write", killed)
    _opened(folder).save(11, _state(11), {"config": {}})
    assert seen[0].step == 10
    assert [passed.is_damage for passed in seen[0].passed_over] == [False]
    shutil.rmtree(folder / "11")
    (folder.parent / "copy").rename(folder / "11")
    assert _opened(folder).newest_whole().step == 10
    monkeypatch.undo()
    _opened(folder).save(11, _state(11), {"config": {}})
    assert _opened(folder).newest_whole().step == 11


def _run(workdir: pathlib.Path, *arguments: str) -> int:
    return train.main([TINY, f"--config.workdir={workdir}", *OPTIONS, *arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
    """A run of 4 steps with checkpoints at 2 and 4."""
    workdir = tmp_path_factory.mktemp("finished")
    assert _run(workdir, "--config.steps=4", "--config.checkpoint.save_steps=2") == 0
    return workdir


@pytest.fixture
def damaged(finished, tmp_path) -> pathlib.Path:
    """That run with a flipped bit in an array file of step 4, and the rests of killed saves."""
    workdir = shutil.copytree(finished, tmp_path / "run")
    step = workdir / "checkpoints" / "4"
    file = max(step.rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    (workdir / "checkpoints" / "6").mkdir()
    shutil.copytree(step, workdir / "checkpoints" / "8.orbax-checkpoint-tmp")
    with (workdir / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "train", "st')  # Killed while it wrote this.
    return workdir


def test_auto_goes_on_from_the_newest_whole_step_and_says_why(damaged, finished, capsys):
    assert _run(damaged, "--config.steps=4", "--config.checkpoint.save_steps=2") == 0
    out = capsys.readouterr().out
    folder = damaged / "checkpoints"
    assert f"passed over {folder / '4'}: is damaged: state/" in out
    assert f"passed over {folder / '6'}: is not a complete checkpoint" in out
    assert f"passed over {folder / '8.orbax-checkpoint-tmp'}: is not a complete" in out
    assert "resuming from step 2" in out
    opened = [_opened(workdir / "checkpoints") for workdir in (damaged, finished)]
    states = [one.leaves(4, "state") for one in opened]
    assert states[0].keys() == states[1].keys()
    for name, leaf in states[0].items():
        np.testing.assert_array_equal(leaf, states[1][name], err_msg=name)
    lines = map(json.loads, (damaged / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]


def test_must_and_never_do_not_pass_over_damage(damaged):
    with pytest.raises(errors.CheckpointError, match="4: is damaged: .*delete the folder"):
        _run(damaged, "--config.steps=6", "--config.checkpoint.resume=must")
    shutil.rmtree(damaged / "checkpoints" / "2")
    with pytest.raises(errors.CheckpointError, match="holds a run with a checkpoint at step 4"):
        _run(damaged, "--config.steps=6", "--config.checkpoint.resume=never")
    with pytest.raises(errors.CheckpointError, match="4: is damaged"):
        _run(damaged, "--config.steps=6")  # Nothing whole is left: not begun anew unasked.


def test_killed_saves_alone_are_no_reason_to_stop(finished, tmp_path, capsys):
    workdir = shutil.copytree(finished, tmp_path / "run")
    (workdir / "checkpoints" / "4" / manifest.NAME).unlink()
    assert _run(workdir, "--config.steps=3", "--config.checkpoint.resume=must") == 0
    assert "resuming from step 2" in capsys.readouterr().out


def _unfinish(step: pathlib.Path, **changes: object) -> None:
    """Makes a step what a kill leaves before its manifest is there, or another version's."""
    (step / manifest.NAME).unlink()
    file = step / "meta" / "metadata"
    meta = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in meta.items() if value is not None}))


def test_a_first_save_that_was_killed_begins_anew_by_itself(finished, tmp_path, capsys):
    workdir = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / "4")
    _unfinish(workdir / "checkpoints" / "2")
    assert _run(workdir, "--config.steps=1") == 0
    assert "2: is not a complete checkpoint: its save was killed" in capsys.readouterr().out
    assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["1"]


@pytest.mark.parametrize("mode", ["auto", "must", "never"])
def test_steps_of_another_version_are_not_begun_over(finished, tmp_path, mode):
    workdir = shutil.copytree(finished, tmp_path / "run")
    for step in ("2", "4"):
        _unfinish(workdir / "checkpoints" / step, format=None)
    with pytest.raises(errors.CheckpointError) as caught:
        _run(workdir, "--config.steps=1", f"--config.checkpoint.resume={mode}")
    folders = [str(workdir / "checkpoints" / step) for step in ("4", "2")]
    assert [problem.where for problem in caught.value.problems] == folders
    assert "this version of purelora" in str(caught.value)
    assert "choose another workdir, or delete it" in str(caught.value)
    assert (workdir / "checkpoints" / "2" / "state").is_dir()


def test_a_disk_without_room_is_found_before_anything_is_written(folder, monkeypatch):
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(errors.CheckpointError, match="11: cannot be written .1.0 MB are free"):
        _opened(folder).save(11, _state(11), {"config": {}})
    assert sorted(path.name for path in folder.iterdir()) == ["10", "5"]
    assert _opened(folder).newest_whole() == (10, ())


# Runs the command with files that may not grow beyond so many bytes.
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
runpy.run_module("purelora.train", run_name="__main__")
"""


def _command(
    workdir: pathlib.Path, *arguments: str, largest_file_bytes: int = 10**9
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(largest_file_bytes), TINY]
    return subprocess.run(
        [*command, f"--config.workdir={workdir}", *OPTIONS, *arguments],
        capture_output=True,
        text=True,
        env=ENV,
        cwd=REPO,
        check=False,
    )


def test_a_write_that_fails_ends_the_run_and_keeps_the_old_checkpoint(finished, tmp_path):
    """Files may not grow beyond 50 kB, which the arrays do."""
    workdir = shutil.copytree(finished, tmp_path / "run")
    done = _command(
        workdir,
        "--config.steps=8",
        "--config.checkpoint.save_steps=2",
        "--config.compile_cache=None",
        largest_file_bytes=50_000,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("CheckpointError: ") and "checkpoints/6: cannot be written" in last
    opened = _opened(workdir / "checkpoints")
    assert opened.newest_whole() == (4, ())
    assert opened.steps() == [2, 4]
    assert _run(workdir, "--config.steps=6", "--config.checkpoint.save_steps=2") == 0


@pytest.fixture
def small_disk(tmp_path) -> Iterator[pathlib.Path]:
    """A file system of 3 MB, where mounting one is permitted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=3m tmpfs {disk}"
    if subprocess.run(mount, shell=True, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_ends_the_run_and_keeps_the_old_checkpoint(finished, small_disk):
    workdir = shutil.copytree(finished, small_disk / "run")
    free = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(bytes(max(0, free - 900_000)))
    done = _command(workdir, "--config.steps=6", "--config.checkpoint.save_steps=2")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "checkpoints/6: cannot be written" in done.stderr.splitlines()[-1]
    assert _opened(workdir / "checkpoints").newest_whole() == (4, ())
    (small_disk / "filler").unlink()
    assert _run(workdir, "--config.steps=6", "--config.checkpoint.save_steps=2") == 0


def test_a_full_disk_under_the_records_is_an_error_too(small_disk):
    """Not even the records fit."""
    free = shutil.disk_usage(small_disk).free
    workdir = small_disk / "run"
    workdir.mkdir()
    (small_disk / "filler").write_bytes(bytes(free - 8192))
    done = _command(workdir, "--config.steps=200")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Error: " in done.stderr.splitlines()[-1]
    assert "cannot be written" in done.stderr.splitlines()[-1]
