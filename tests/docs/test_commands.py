"""Every command of the README and docs/ works, on small substitutes.

A command is run here in this process, with the substitutions of `SUBSTITUTES`, or one of
`ELSEWHERE` says which test or lane runs it. A command that no rule covers fails.
"""

import importlib
import importlib.util
import io
import os
import pathlib
import re
import shlex

import pytest

from tests.support import documents

REPO = documents.REPO
# In a command's text, in this order: what is large or not here, and what is in its place.
SUBSTITUTES = (
    # Estimates are of small shapes, for two devices, and without the search of what fits 80 GB.
    (r"configs/shapes/gemma4_26b\.json", "configs/shapes/small/gemma4_26b.json"),
    (r"configs/shapes/llama\w+\.json", "configs/shapes/small/llama3_1_8b.json"),
    (r"--devices=\d+", "--devices=2"),
    (r"--memory_gb=\d+", ""),
    (r"--config\.mesh\.tensor=\d+", "--config.mesh.tensor=2"),
    # The tiny model's vocabulary does not divide over two devices.
    (r"--plan", f"--plan --config.model.path=random:{REPO}/configs/shapes/small/llama3_1_8b.json"),
    (r"--config\.max_length=\d+", "--config.max_length=64"),
    # The real model, and what was trained on it, by the tiny one.
    (r"--config=(configs/(qlora|lora|tiny)\.py|qlora)", f"--config={REPO}/configs/tiny.py"),
    (r"(=)configs/", rf"\1{REPO}/configs/"),
    (r"smollm2-135m", "tiny"),
    (r"runs/by_hand", "runs/qlora"),
)
SMALL = {
    "train": "--config.steps=1 --config.accum_steps=1 --config.max_length=64 "
    "--config.optim.warmup_steps=0 --config.data.eval_fraction=0.01 --config.sample_prompts=",
    "generate": "--max-new-tokens=2",
    "chat": "--max-new-tokens=2",
}
WORKDIR = "--config.workdir="
# Commands that another test or a lane of .ci/run covers: how they look, and the files that do.
ELSEWHERE = (
    (r"python3 -m venv \.venv", [".ci/run"]),
    (r"pip install -e .*", [".ci/run"]),
    (r"ruff (format|check)", [".ci/run"]),
    (r"mypy purelora", [".ci/run"]),
    (r"(python -m )?pytest\b.*", [".ci/run"]),
    (r"python benchmarks/\w+\.py.*", [".ci/run"]),
    (r"python -m purelora\.verify --config=configs/tiny\.py", ["tests/commands/test_verify.py"]),
    (r".* --coordinator_address=.*", ["tests/multihost/test_several_processes.py"]),
    (r"python -m purelora\.launch .*", ["tests/multihost/test_several_processes.py"]),
    (r"python -m purelora\.config\.document .*", ["tests/config/test_schema.py"]),
    (r".*=/ckpts/.*", ["tests/interop/test_maxtext.py"]),
)
NAME_ONLY = re.compile(r"python -m purelora\.\w+")
COMMANDS = documents.commands()
RUN_HERE = re.compile(r"python -m purelora\.(\w+) (.*)")


def rule_of(command: documents.Command) -> str | None:
    """What covers a command: "name", "elsewhere", "here" or nothing."""
    text = shlex.join(command.words).replace("'", "")
    if NAME_ONLY.fullmatch(text):
        return "name"
    if any(re.fullmatch(pattern, text) for pattern, _ in ELSEWHERE):
        return "elsewhere"
    return "here" if RUN_HERE.fullmatch(text) else None


def of_rule(rule: str | None) -> list[documents.Command]:
    return [command for command in COMMANDS if rule_of(command) == rule]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    """A folder with what the commands name: a run, a model's folder, data and two adapters."""
    folder = tmp_path_factory.mktemp("site")
    row = '{"question": "What is purelora?", "answer": "A program."}\n'
    (folder / "FILE.jsonl").write_text(row * 200)
    here = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        readme = next(c for c in of_rule("here") if c.page == "README.md")
        assert run(readme, f"{WORKDIR}runs/qlora") == 0
        merging = "python -m purelora.merge --adapter=runs/qlora --output=FOLDER"
        assert run(documents.Command("", tuple(shlex.split(merging)))) == 0
    finally:
        os.chdir(here)
    for name in ("A", "B"):
        (folder / name).symlink_to(folder / "runs" / "qlora")
    return folder


def substituted(command: documents.Command) -> tuple[str, list[str]]:
    """The module of a command, and its arguments with what stands in for large things."""
    text = shlex.join(command.words)
    for pattern, instead in SUBSTITUTES:
        text = re.sub(pattern, instead, text)
    _, _, module, *arguments = shlex.split(text)
    name = module.removeprefix("purelora.")
    return name, arguments + shlex.split(SMALL.get(name, ""))


def run(command: documents.Command, *more: str) -> int:
    name, arguments = substituted(command)
    return importlib.import_module(f"purelora.commands.{name}").main([*arguments, *more])


def test_every_command_is_covered():
    assert [str(command) for command in of_rule(None)] == []
    assert len(of_rule("here")) >= 15


def in_lanes(commands: list[documents.Command]) -> list:
    """The commands as cases; the estimates of plans.md, which differ little, are in lane `more`."""
    return [
        pytest.param(c, id=str(c), marks=pytest.mark.more if c.page == "plans.md" else ())
        for c in commands
    ]


@pytest.mark.parametrize("command", in_lanes(of_rule("here")))
def test_a_command_works(command, site, monkeypatch, tmp_path):
    monkeypatch.chdir(site)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/quit\n"))
    more = []
    if substituted(command)[0] == "train" and not any(w.startswith(WORKDIR) for w in command.words):
        more = [f"{WORKDIR}{tmp_path}/run"]
    assert run(command, *more) == 0


@pytest.mark.parametrize("command", of_rule("name"), ids=str)
def test_a_command_that_is_named_exists(command):
    name = command.words[-1].removeprefix("purelora.")
    assert importlib.util.find_spec(f"purelora.commands.{name}")


@pytest.mark.parametrize("command", of_rule("elsewhere"), ids=str)
def test_what_runs_a_command_elsewhere_exists(command):
    text = shlex.join(command.words).replace("'", "")
    files = [file for pattern, names in ELSEWHERE if re.fullmatch(pattern, text) for file in names]
    named = [word for word in command.words if re.fullmatch(r"(tests|benchmarks)/[\w/]+\.py", word)]
    assert not [file for file in files + named if not (REPO / file).exists()]


def test_options_of_benchmarks_exist():
    for command in of_rule("elsewhere"):
        script = next((word for word in command.words if word.startswith("benchmarks/")), None)
        if script is None:
            continue
        text = (REPO / script).read_text()
        options = [word.partition("=")[0] for word in command.words if word.startswith("--")]
        assert not [option for option in options if f'"{option}"' not in text]


def test_extras_and_markers_exist():
    setup = (REPO / "setup.cfg").read_text()
    for command in of_rule("elsewhere"):
        for extras in re.findall(r"\.\[([\w,]+)\]", " ".join(command.words)):
            assert not [e for e in extras.split(",") if not re.search(rf"^{e} =$", setup, re.M)]
        if "pytest" in command.words and "-m" in command.words[command.words.index("pytest") :]:
            chosen = command.words[command.words.index("-m", command.words.index("pytest")) + 1]
            markers = set(re.findall(r"\w+", chosen)) - {"or", "and", "not"}
            assert not [m for m in markers if not re.search(rf"^    {m}: ", setup, re.M)]


def test_commands_are_taken_from_all_forms_of_code():
    text = (
        "```sh\nA=1 python -m a \\\n    --b=c &&\n.venv/bin/pip install d\n```\n"
        "Use `pytest -m slow`, `x` or\n\n    B=2 python e \\\n        --f\n\n"
    )
    assert documents.commands_of(text) == [
        ("python", "-m", "a", "--b=c"),
        ("pip", "install", "d"),
        ("python", "e", "--f"),
        ("pytest", "-m", "slow"),
    ]
