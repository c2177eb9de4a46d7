"""What is installed: every package, the ready configs, and the console command."""

import configparser
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest
import setuptools

from purelora.commands import console
from purelora.config import command_line, config_file
from purelora.core import errors

REPO = pathlib.Path(__file__).parents[1]
READY = "purelora.ready.configs"
OWN_CONFIG = """from configs import tiny

def get_config():
    c = tiny.get_config()
    c.steps = 3
    return c
"""


def parsed(argument: str):
    return command_line.parse([argument], flags=()).config


def test_setup_cfg_names_every_package():
    parser = configparser.ConfigParser()
    parser.read(REPO / "setup.cfg")
    named = parser["options"]["packages"].split()
    assert named == [*sorted(setuptools.find_packages(str(REPO), include=["purelora*"])), READY]


def test_every_command_has_a_door_of_its_own_and_is_listed():
    doors = {path.stem for path in (REPO / "purelora").glob("*.py")} - {"__init__", "__main__"}
    assert doors == set(console.NAMES)
    for name in console.NAMES:
        assert f"  {name} " in console.usage()


def test_a_ready_config_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parsed("--config=tiny").workdir == "runs/tiny"
    small = parsed("--config=mixtral_8x7b_qlora:small")
    assert small.model.path.startswith("random:")


def test_a_file_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("tiny").write_text(OWN_CONFIG)
    assert parsed("--config=tiny").steps == 3
    assert parsed("--config=./tiny").steps == 3


def test_an_unknown_name_lists_the_ready_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.ConfigError, match="'tinny'.*did you mean 'tiny'.*known: .*qlora"):
        config_file.load(pathlib.Path("tinny"))


def test_loading_leaves_the_path_as_it_was(tmp_path):
    before = list(sys.path)
    config_file.load(pathlib.Path("tiny"))
    assert sys.path == before


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--help"], 0, "  train "),
        ([], 0, "  train "),
        (["trian"], 2, "'trian': is no command; did you mean 'train'?"),
        (["export", "--help"], 0, "--run=PATH"),
        (["train"], 2, "--config: is missing"),
    ],
)
def test_the_console_command(arguments, status, text, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["purelora", *arguments])
    with pytest.raises(SystemExit) as stopped:
        console.main()
    assert stopped.value.code == status
    captured = capsys.readouterr()
    assert text in captured.out + captured.err


def test_the_help_and_the_library_wait_for_no_jax():
    script = (
        "import sys, purelora\n"
        "from purelora.commands import console\n"
        "console.usage(), dir(purelora)\n"
        "assert not {'jax', 'flax', 'numpy'} & sys.modules.keys(), 'imported too early'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPO)


@pytest.mark.slow
def test_the_wheel_trains_in_another_folder(tmp_path):
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    ignored = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "tests")
    shutil.copytree(REPO, source, ignore=ignored)
    elsewhere.mkdir()
    flags = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(source)], check=True)
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    run = [sys.executable, "-m", "purelora", "train", "--config=tiny", "--config.steps=1"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    environment.pop("XLA_FLAGS", None)  # One device, as a user's CPU has.
    subprocess.run(run, check=True, cwd=elsewhere, env=environment)
    assert (elsewhere / "runs" / "tiny" / "adapter").is_dir()
