"""The command line: overrides by type, files that cannot be used, errors without tracebacks."""

import dataclasses
import pathlib
import subprocess
import sys
import typing
from typing import Literal

import pytest

from purelora.commands import adapters, chat, export, generate, merge, verify
from purelora.config import command_line
from purelora.core import errors

REPO = pathlib.Path(__file__).parents[2]
TINY = f"--config={REPO}/configs/tiny.py"


def parsed(*arguments: str):
    return command_line.parse([TINY, *arguments], flags=("plan",)).config


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("lora.r=8", 8),
        ("lora.lora_alpha=3", 3.0),
        ("optim.learning_rate=2e-5", 2e-5),
        ("optim.clip_norm=None", None),
        ("data.packing=False", False),
        ("data.packing=true", True),
        ("data.eval_fraction=0", 0.0),
        ("workdir=3", "3"),
        ("lora.target_modules=q_proj,v_proj", ("q_proj", "v_proj")),
        ("lora.target_modules=['q_proj']", ("q_proj",)),
        ("lora.target_modules=('q_proj')", ("q_proj",)),
        (r"lora.target_modules=.*\.(q|v)_proj", r".*\.(q|v)_proj"),
        ("quant.skip=()", ()),
        ("quant.skip=(mlp|embed_tokens)", ("(mlp|embed_tokens)",)),
        ("sample_prompts=Hello, who are you?", ("Hello, who are you?",)),
        (r"lora.target_modules=.*layers\.\d{1,2}\..*q_proj", r".*layers\.\d{1,2}\..*q_proj"),
        ("sample_prompts=['one, two']", ("one, two",)),
    ],
)
def test_an_override_takes_the_type_of_its_key(argument, value):
    key = argument.partition("=")[0]
    config = parsed(f"--config.{argument}")
    for part in key.split("."):
        config = getattr(config, part)
    assert config == value
    assert type(config) is type(value)


def test_value_may_follow_as_the_next_argument():
    assert parsed("--config.lora.r", "8").lora.r == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.lora.rr=8"], r"lora\.rr: is not a key of purelora; did you mean lora\.r"),
        (["--config.lora.lora_rank=8"], r"lora\.lora_rank.*use lora\.r"),
        (["--config.load_parameters_path=x"], r"load_parameters_path.*use model\.path"),
        (["--config.max_target_length=9"], r"max_target_length.*use max_length"),
        (["--config.lora.lora_restore_path=x"], r"lora_restore_path.*use init_adapter"),
        (["--config.lora.r=x"], r"lora\.r = 'x': must be a whole number"),
        (["--config.lora.r=1.5"], r"lora\.r = '1\.5': must be a whole number"),
        (["--config.dtype=fp16"], r"dtype = 'fp16': must be one of 'float32', 'bfloat16'"),
        (["--config.data.packing=yes"], r"data\.packing = 'yes': must be True or False"),
        (["--config.lora=3"], r"lora = '3': is a section of keys"),
        (["--config.lora.r"], r"has no value; write --config\.lora\.r=VALUE"),
        (["--lora.r=3"], r"write --config\.lora\.r"),
        (["--learning_rate=3"], r"--config\.KEY=VALUE sets a key; here it is optim"),
        (["--plann"], r"did you mean --plan\?"),
        (["--config.lora.r=0"], r"lora\.r = 0: must be "),
        (["--config.lora.lora_alpha=0"], r"lora\.lora_alpha = 0\.0: makes the scaling"),
        (["--config.optim.learning_rate=nan"], r"optim\.learning_rate = nan: must be a float32"),
    ],
)
def test_a_wrong_argument_is_one_clear_error(arguments, message):
    with pytest.raises(errors.ConfigError, match=message):
        parsed(*arguments)


def test_all_problems_are_reported_at_once():
    with pytest.raises(errors.ConfigError) as caught:
        parsed("--config.lora.rr=8", "--config.seed=x", "--config.dtype=fp16")
    assert len(caught.value.problems) == 3
    with pytest.raises(errors.ConfigError) as caught:
        parsed("--config.lora.r=0", "--config.batch_size=0", "--config.epochs=3")
    assert {p.where for p in caught.value.problems} >= {"lora.r", "batch_size", "steps, epochs"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no get_config"),
        ("def get_config(:", r"conf\.py:1.*SyntaxError"),
        ("raise RuntimeError('x')", r"conf\.py:1: RuntimeError"),
        ("import nonsuch", r"conf\.py:1.*nonsuch"),
        ("\ndef get_config():\n  return 1 / 0", r"conf\.py:3: ZeroDivisionError"),
        ("def get_config():\n  return {}", r"has no get_config\(\) that returns a ConfigDict"),
        ("from configs import base\ndef get_config():\n  c = base.get_config()\n  c.lora.rr = 1\n"
         "  return c", r"lora\.rr"),
        ("from configs import base\ndef get_config():\n  c = base.get_config()\n  c.lora.r = 'x'\n"
         "  return c", r"conf\.py:4: TypeError"),
        ("from ml_collections import ConfigDict\ndef get_config():\n  return ConfigDict()",
         r"workdir: is missing"),
    ],
)  # fmt: skip
def test_a_config_file_that_cannot_be_used(tmp_path, monkeypatch, text, message):
    monkeypatch.syspath_prepend(str(REPO))
    path = tmp_path / "conf.py"
    path.write_text(text)
    with pytest.raises(errors.ConfigError, match=message):
        command_line.parse([f"--config={path}"], flags=())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny.py", r"tiny\.py:smal: names a variant, but the file has none; write .*tiny\.py$"),
        ("mixtral_8x7b_qlora.py", r"correct or leave out 'smal', or fix the config file$"),
    ],
)
def test_a_variant_that_a_config_file_does_not_have(name, message):
    with pytest.raises(errors.ConfigError, match=message):
        command_line.parse([f"--config={REPO / 'configs' / name}:smal"], flags=())


@pytest.mark.parametrize(
    ("path", "message"), [("nonsuch.py", "is not a file"), (str(REPO), "is not a file")]
)
def test_a_config_path_that_is_no_file(path, message):
    with pytest.raises(errors.ConfigError, match=message):
        command_line.parse([f"--config={path}"], flags=())


def test_a_config_file_that_is_not_text(tmp_path):
    path = tmp_path / "conf.py"
    path.write_bytes(b"\xff\xfe\x00nonsense")
    with pytest.raises(errors.ConfigError, match="conf.py"):
        command_line.parse([f"--config={path}"], flags=())


def test_without_config_the_error_says_what_to_write():
    with pytest.raises(errors.ConfigError, match=r"--config: is missing; for example --config="):
        command_line.parse([], flags=())


@dataclasses.dataclass(frozen=True)
class Options:
    model: str
    prompt: tuple[str, ...] = ()
    max_new_tokens: int = 64
    temperature: float = 0.0
    tile_size: int | None = None
    output: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    raw: bool = False


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ([], {}),
        (["--max-new-tokens=3"], {"max_new_tokens": 3}),
        (["--max_new_tokens", "3"], {"max_new_tokens": 3}),
        (["--max-new-tokens", "-3"], {"max_new_tokens": -3}),
        (["--temperature=1"], {"temperature": 1.0}),
        (["--tile-size=None"], {"tile_size": None}),
        (["--tile-size", "8", "--raw"], {"tile_size": 8, "raw": True}),
        (["--output=3"], {"output": "3"}),
        (["--output="], {"output": ""}),
        (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
        (["--prompt=a, b = c", "--raw", "--prompt", "[d]"], {"prompt": ("a, b = c", "[d]"),
                                                            "raw": True}),
        (["--prompt=--raw"], {"prompt": ("--raw",)}),
    ],
)  # fmt: skip
def test_options_fill_the_dataclass(arguments, changes):
    found = command_line.options(Options, ["--model", "tiny", *arguments])
    want = Options(**{"model": "tiny", **changes})
    assert found == want
    assert list(map(type, vars(found).values())) == list(map(type, vars(want).values()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"^--model: is missing; write --model=VALUE$"),
        (["--model"], r"^--model: has no value; write --model=VALUE$"),
        (["--model", "--raw"], r"^--model: has no value; write --model=VALUE$"),
        (["--model=a", "--model=b"], r"^--model = 'b': is given more than once; give it once$"),
        (["--model=a", "--raw=x"], r"^--raw: takes no value; write --raw$"),
        (["--model=a", "--raw", "x"], r"^x: is not an argument of this command; known: --model, "),
        (["--model=a", "--max-tokens", "3"], r"^--max-tokens: is not .*mean --max-new-tokens\?$"),
        (["--model=a", "--dtyp=float32"], r"^--dtyp: is not .*; did you mean --dtype\?$"),
        (["--model=a", "-prompt", "x"], r"^-prompt: is not .*; did you mean --prompt\?$"),
        (["--model=a", "model=b"], r"^model: is not .*; did you mean --model\?$"),
        (["--model=a", "--max-new-tokens=x"], r"^--max-new-tokens = 'x': must be a whole number$"),
        (["--model=a", "--tile-size=1.5"], r"^--tile-size = '1.5': must be a whole number or None"),
        (["--model=a", "--temperature=hot"], r"^--temperature = 'hot': must be a number$"),
        (["--model=a", "--dtype=fp16"], r"^--dtype = 'fp16': must be one of 'float32', 'bfloat16'"),
    ],
)
def test_a_wrong_option_is_one_clear_error(arguments, message):
    with pytest.raises(errors.ConfigError, match=message):
        command_line.options(Options, arguments)


def test_all_problems_of_options_are_reported_at_once():
    with pytest.raises(errors.ConfigError) as caught:
        command_line.options(Options, ["--promt=x", "--tile-size=x", "--raw=1", "--output"])
    where = [problem.where for problem in caught.value.problems]
    assert sorted(where) == ["--model", "--output", "--promt", "--raw", "--tile-size"]


def test_paths_take_the_home_of_the_user(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Paths:
        output: str
        adapter: tuple[str, ...]
        model: str | None = None
        run: str | None = None
        prompts_file: str | None = None
        system: str | None = None

    monkeypatch.setenv("HOME", "/home/me")
    names = ("output", "model", "run", "prompts-file", "system")
    arguments = [f"--{name}=~/x" for name in names]
    adapters = ["--adapter=~/a", "--adapter=b=~/b", "--adapter=./~/c=d", "--adapter=smollm2-135m"]
    found = command_line.options(Paths, [*arguments, *adapters])
    home = "/home/me"
    assert found == Paths(
        output=f"{home}/x",
        adapter=(f"{home}/a", f"b={home}/b", "./~/c=d", "smollm2-135m"),
        model=f"{home}/x",
        run=f"{home}/x",
        prompts_file=f"{home}/x",
        system="~/x",
    )
    with pytest.raises(errors.ConfigError, match="/home/me/nonsuch.py"):
        command_line.parse(["--config=~/nonsuch.py"], flags=())


def test_every_text_of_a_command_is_a_path_or_known_not_to_be_one():
    texts = {"chat_template_kwargs", "prompt", "skip", "system", "use", "weight"}
    found = set()
    for command in (adapters, chat, export, generate, merge, verify):
        for name, kind in typing.get_type_hints(command.Options).items():
            is_text = "str" in str(kind) or kind is str
            found |= {name} if is_text else set()
    assert found == texts | command_line.PATHS


def test_a_list_may_be_absent():
    @dataclasses.dataclass(frozen=True)
    class Lists:
        skip: tuple[str, ...] | None = None

    assert command_line.options(Lists, []).skip is None
    assert command_line.options(Lists, ["--skip=a,b", "--skip="]).skip == ("a,b", "")


def test_numbers_that_are_given_several_times():
    assert command_line.numbers("--weight", ["2", "-0.5", "1e-3"]) == [2.0, -0.5, 1e-3]
    with pytest.raises(errors.ConfigError) as caught:
        command_line.numbers("--weight", ["x", "1", "nan", "-inf"])
    assert [(p.where, p.value) for p in caught.value.problems] == [
        ("--weight", "x"), ("--weight", "nan"), ("--weight", "-inf")
    ]  # fmt: skip


def test_the_default_of_what_stays_unquantised_is_that_of_training():
    assert command_line.QUANT_SKIP == parsed().quant.skip


def test_the_command_prints_errors_without_traceback_and_exits_2(tmp_path):
    command = [sys.executable, "-m", "purelora.train", TINY, "--config.lora.r=0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: lora.r = 0: ")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_help_shows_the_usage(tmp_path):
    command = [sys.executable, "-m", "purelora.train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    assert "--config=FILE" in done.stdout


def test_every_config_file_parses_and_documents_its_command():
    for path in sorted((REPO / "configs").glob("*.py")):
        if path.stem in ("__init__", "base", "variants"):
            continue
        text = path.read_text()
        assert f"python -m purelora.train --config=configs/{path.name}" in text, path
        # What it costs, and what comes out: of a large model, by estimate and of a small variant.
        assert "GB" in text and ("eval loss" in text or f"{path.name}:small" in text), path
        command_line.parse([f"--config={path}"], flags=())


def test_base_config_comments_every_key():
    lines = (REPO / "configs" / "base.py").read_text().splitlines()
    keys = [
        i
        for i, line in enumerate(lines)
        if line.startswith("    c.") and "ConfigDict()" not in line
    ]
    assert len(keys) > 50
    for index in keys:
        # A comment above the key, or above the run of keys it belongs to.
        above = index - 1
        while lines[above].startswith("    c.") and "ConfigDict()" not in lines[above]:
            above -= 1
        assert lines[above].lstrip().startswith("#"), lines[index]
