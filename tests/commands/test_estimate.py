"""Estimates: parts against counts by hand, the formula against the compiler, the command."""

import dataclasses
import json
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import pytest

from purelora.analysis import estimate_report, footprint, hlo, step_bytes
from purelora.commands import estimate
from purelora.config import command_line, schema
from purelora.core import errors
from purelora.interop import open_model
from purelora.models import causal_lm
from purelora.training import planning
from purelora.training.plan import Plan
from tests.support import tiny

BASE = pathlib.Path(__file__).parents[2] / "configs" / "base.py"
ROWS, LENGTH, RANK, LAYERS = 16, 64, 4, 4
D, F, V, NH, KH = 32, 48, 64, 32, 16  # Of tiny.hf_config: 4 heads of 8, 2 of them for keys.
KERNELS = ((D, NH), (D, KH), (D, KH), (NH, D), (D, F), (D, F), (F, D))
CODES = sum(n_in * n_out for n_in, n_out in KERNELS)
# One scale per output channel.
SCALES = sum(n_out for _, n_out in KERNELS)
ADAPTERS = sum(RANK * (n_in + n_out) for n_in, n_out in KERNELS)


def settings(**changes: object) -> schema.Config:
    """Settings of an int8 run of adapters on all linear modules, with `changes` by dotted key."""
    keys = {
        "model.path": "here",
        "steps": 1,
        "dtype": "float32",
        "quant.qtype": "int8",
        "lora.r": RANK,
        "batch_size": ROWS,
        "max_length": LENGTH,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    overrides = [f"--config.{key}={value}" for key, value in keys.items()]
    return command_line.parse([f"--config={BASE}", *overrides], flags=()).config


def plan_of(c: schema.Config, count: int = 1, layers: int = LAYERS) -> Plan:
    hf_config = tiny.hf_config(num_hidden_layers=layers)
    return planning.make_plan(c, hf_config, "config.json", jax.devices()[:count])


def parts_of(plan: Plan) -> step_bytes.Parts:
    return step_bytes.counted(plan, step_bytes.abstract_arguments(plan))


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (1, 8), (2, 4)])
def test_parts_are_those_counted_by_hand(data, fsdp):
    ways = data * fsdp
    parts = parts_of(plan_of(settings(mesh__data=data, mesh__fsdp=fsdp, accum_steps=2), ways))
    tokens = ROWS // 2 // ways * LENGTH  # Of one micro-batch, on a device.
    # Scales follow their output channels: those of o_proj and down_proj are sharded.
    scales = LAYERS * (SCALES - 2 * D + 2 * D // fsdp)
    norms = LAYERS * 2 * D + D
    assert parts.base == {
        "int8": LAYERS * CODES // fsdp,
        "float32": 4 * (scales + norms + V * D // fsdp),
    }
    assert parts.trained == parts.gradients == 4 * LAYERS * ADAPTERS
    counters = 3 * 4 + 8  # Adam's, step, updates; the key.
    assert parts.moments == 2 * parts.trained + counters
    assert parts.batch == 5 * 2 * tokens * 4
    assert parts.logits == 4 * 256 * V if tokens > 256 else 4 * tokens * V
    gathered = CODES + 4 * 2 * D if fsdp > 1 else 0
    assert parts.gathered_layer == gathered
    assert parts.gathered_table == (4 * V * D if fsdp > 1 else 0)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_activations_grow_by_what_a_layer_keeps(remat):
    """Query, key, value, result and its log-sum-exp; both residuals; gate and up; x A of all."""
    two, four = (
        parts_of(plan_of(settings(remat=remat), layers=layers)).activations for layers in (2, 4)
    )
    tokens = ROWS * LENGTH
    saved = NH + 2 * KH + NH + 4 + 2 * D + 2 * F + len(KERNELS) * RANK
    scalings = len(KERNELS) + 1  # And the position in the stack.
    assert (four - two) / 2 == 4 * (tokens * (saved if remat == "none" else D) + scalings)


def test_adapters_that_are_sharded_have_whole_gradients():
    sharded = parts_of(plan_of(settings(mesh__shard_adapters=True), 8))
    whole = 4 * LAYERS * ADAPTERS
    # Every adapter has one matrix with an `embed` dimension.
    with_embed = 4 * LAYERS * RANK * D * len(KERNELS)
    assert sharded.trained == whole - with_embed + with_embed // 8
    assert sharded.gradients == whole


def test_tensor_parallel_parts():
    parts = parts_of(plan_of(settings(mesh__fsdp=2, mesh__tensor=2), 4))
    assert parts.base["int8"] == LAYERS * CODES // 4
    assert parts.logits == 4 * 256 * V // 2
    assert parts.gathered_table == 4 * V * D // 2


def test_full_fine_tuning_has_no_base():
    parts = parts_of(plan_of(settings(lora__enabled=False, quant__qtype="none"), 8))
    weights = LAYERS * CODES + V * D
    norms = LAYERS * 2 * D + D
    assert parts.base == {}
    assert parts.trained == parts.gradients == 4 * (weights // 8 + norms)
    assert parts.gathered_layer == 4 * CODES


FEW = {"lora__target_modules": "q_proj,down_proj"}
CASES = [
    pytest.param({"remat": "full", "accum_steps": 2}, 8, marks=pytest.mark.slow),
    pytest.param({"mesh__data": 2, "mesh__shard_adapters": True}, 8, marks=pytest.mark.slow),
    ({"mesh__data": 2, "mesh__tensor": 2, "accum_steps": 2, "dtype": "bfloat16"} | FEW, 8),
]


@pytest.mark.parametrize(("changes", "count"), CASES, ids=str)
def test_formula_beside_the_compiler(changes, count):
    c = settings(**changes)
    hf_config = tiny.hf_config(num_hidden_layers=12)
    devices = jax.devices()[:count]
    exact = footprint.compiled(planning.make_plan(c, hf_config, "config.json", devices))
    assert exact.argument_bytes == exact.parts.arguments
    # Otherwise the parts would not be parts of it.
    assert exact.temp_bytes > exact.parts.activations + exact.parts.gradients
    formula = footprint.formula(c, hf_config, "config.json", devices, (2, 4))
    assert formula.argument_bytes == exact.argument_bytes
    assert formula.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.05)
    assert formula.parts == exact.parts
    assert sorted(formula.traffic) == sorted(exact.traffic)
    assert exact.traffic and not exact.unknown_loops


def test_a_formula_needs_more_layers_than_it_is_made_from():
    with pytest.raises(errors.ModelError, match="num_hidden_layers = 3: is not more than the 4"):
        footprint.formula(settings(), tiny.hf_config(), "config.json", jax.devices()[:1], (2, 4))


def peaks(fixed: int, each: int, floor: int = 0):
    calls: list[int] = []

    def peak_of(rows: int) -> int:
        calls.append(rows)
        return max(floor, fixed + each * rows)

    return peak_of, calls


@pytest.mark.parametrize("limit", [107, 108, 180, 1000, 12345])
def test_most_rows_on_a_line(limit):
    peak_of, calls = peaks(100, 7)
    fit = footprint.most_rows(peak_of, limit, 10_000)
    assert fit == ((limit - 100) // 7, peak_of((limit - 100) // 7))
    assert len(calls) <= 6


def test_most_rows_where_the_line_bends():
    peak_of, calls = peaks(100, 7, floor=900)
    assert footprint.most_rows(peak_of, 1000, 10_000) == ((1000 - 100) // 7, 996)
    assert len(calls) <= 12


def test_most_rows_at_both_ends():
    assert footprint.most_rows(peaks(100, 7)[0], 106, 10) == (0, 107)
    assert footprint.most_rows(peaks(100, 7)[0], 10**9, 10) == (10, 170)
    assert footprint.most_rows(peaks(100, 0)[0], 100, 10) == (10, 100)


@pytest.fixture
def shape(tmp_path):
    """A config.json alone."""
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(tiny.hf_config()))
    return path


def arguments(shape: pathlib.Path, *more: str) -> list[str]:
    return [
        f"--config={BASE}", f"--config.model.path={shape}", "--config.steps=1",
        f"--config.batch_size={ROWS}", f"--config.max_length={LENGTH}", "--config.quant.qtype=int8",
        *more,
    ]  # fmt: skip


@pytest.fixture
def _made_up(monkeypatch):
    """2 MB and 4 MB a row, or 1 MB a row with remat, instead of seconds of compilation."""
    parts = parts_of(plan_of(settings()))

    def compiled(plan: Plan) -> footprint.Footprint:
        c = plan.config
        rows = c.micro_batch_size // (plan.mesh.shape["data"] * plan.mesh.shape["fsdp"])
        activations = rows * (4_000_000 if c.remat == "none" else 1_000_000)
        temp = activations + parts.gradients + 500_000
        own = dataclasses.replace(parts, activations=activations)
        row = hlo.Traffic("all-gather", ("s8",), 2, 7, 1_000_000)
        rest = 2_000_000 - parts.gradients - 500_000
        return footprint.Footprint("compiled", own, rest, temp, [row], (), 1.0)

    monkeypatch.setattr(footprint, "compiled", compiled)


@pytest.mark.usefixtures("_made_up")
def test_the_command_says_what_fits(shape, capsys):
    assert estimate.main(arguments(shape, "--devices=2", "--memory_gb", "0.02")) == 0
    printed = capsys.readouterr().out
    total = tiny.LAYERS * (CODES + 2 * D) + V * D + D
    trained = tiny.LAYERS * ADAPTERS // RANK * 16
    assert f"{total:,} parameters, {trained:,} trained" in printed
    assert "mesh: data 1 × fsdp 2 × expert 1 × tensor 1; remat none; 8 rows of 64 " in printed
    assert "activations kept for the backward pass            32.0\n" in printed
    assert "working space of a layer or a loss chunk           0.5\n" in printed
    assert "peak                                              34.0\n" in printed
    assert "all-gather            s8             2       7           1.0\n" in printed
    assert "XLA's CPU compiler" in printed
    assert "remat=none: 4 rows a device, batch_size=8, 512 tokens a step, 0.018 GB" in printed
    assert "remat=full: 18 rows a device, batch_size=36, 2,304 tokens a step, 0.02 GB" in printed
    codes, scales = tiny.LAYERS * CODES // 2, tiny.LAYERS * (SCALES - D) * 4
    rest = 4 * (tiny.LAYERS * 2 * D + D + V * D // 2)
    assert f"by quant.tile_size: None {(codes + scales + rest) / 1e9:.4g} (now)" in printed


@pytest.mark.usefixtures("_made_up")
def test_nothing_fits(shape, capsys):
    assert estimate.main(arguments(shape, "--memory_gb=0.0001")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("not one row a device" in line for line in lines) == 2
    (nearest,) = (line for line in lines if "nothing fits; the nearest is remat=full" in line)
    assert "more devices along mesh.fsdp" in nearest


def test_the_command_starts_a_process_with_its_devices(shape):
    """This process has 8 devices, so 12 need another; --config and its value may stand apart."""
    own = ["--config", str(BASE), "--devices=12", "--config.mesh.data=3", "--config.batch_size=12"]
    command = [sys.executable, "-m", "purelora.estimate", *arguments(shape)[1:], *own]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "data 3 × fsdp 4" in done.stdout
    assert "compiled for 12 virtual CPU devices" in done.stdout


def test_that_process_ends_as_the_command_does(shape, monkeypatch):
    started = {}

    def run(command, *, env, check):
        started.update(command=command, env=env, check=check)
        return subprocess.CompletedProcess(command, 2)

    monkeypatch.setattr(subprocess, "run", run)
    argv = arguments(shape, "--devices=9")
    assert estimate.main(argv) == 2
    assert started["command"][1:] == ["-m", "purelora.estimate", *argv]
    assert started["env"]["XLA_FLAGS"].endswith("--xla_force_host_platform_device_count=9")
    assert started["env"]["JAX_PLATFORMS"] == "cpu"


def test_many_layers_one_by_one_go_by_the_formula(monkeypatch, tmp_path, capsys):
    path = tmp_path / "deep.json"
    path.write_text(json.dumps(tiny.hf_config(num_hidden_layers=33)))
    parts = parts_of(plan_of(settings()))
    canned = footprint.Footprint("formula", parts, 10**6, 10**7, (), ("loop.1",), 1.0)
    monkeypatch.setattr(footprint, "formula", lambda *_: canned)
    assert estimate.main(arguments(path, "--config.scan_layers=False")) == 0
    assert "formula, from steps of 16 and 32 layers" in capsys.readouterr().out


def test_loops_without_a_count_are_said(capsys):
    parts = parts_of(plan_of(settings()))
    row = hlo.Traffic("all-reduce", ("f32",), 8, 3, 10**6)
    needs = footprint.Footprint("compiled", parts, 1, 1, [row], ("loop.1",), 1.0)
    printed = list(estimate_report._describe_traffic(needs))
    assert any("at least" in line and "loop.1" in line for line in printed)


def error_of(argv: list[str]) -> str:
    with pytest.raises(errors.UserError) as caught:
        estimate.main(argv)
    return str(caught.value)


def test_users_errors(shape, tmp_path):
    assert "has no config.json" in error_of(arguments(tmp_path))
    assert "cannot be read" in error_of(arguments(tmp_path / "absent.json"))
    text = error_of(arguments(shape, "--devices=6", "--config.mesh.data=4"))
    assert "mesh.data = 4: does not divide the 6 devices" in text
    (tmp_path / "half.json").write_text("{")
    assert "is not valid JSON" in error_of(arguments(tmp_path / "half.json"))


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--devices=0", "--devices = 0: is not between 1 and"),
        ("--memory_gb=-1", "--memory_gb = -1.0: is not a size"),
        ("--memory_gb=nan", "is not a size"),
        ("--method=compile", "did you mean 'compiled'?"),
        ("--device=2", "did you mean --devices?"),
        ("--config.remat=some", "remat"),
    ],
)
def test_wrong_arguments_come_in_one_error(shape, argument, expected):
    text = error_of([*arguments(shape), argument, "--config.lora.rr=1"])
    assert expected in text and "lora.rr" in text


def test_a_folder_needs_no_weights(shape, tmp_path):
    (tmp_path / "config.json").write_text(shape.read_text())
    assert open_model.open_config(str(tmp_path)) == tiny.hf_config()
    assert open_model.open_config("tiny")["hidden_size"] == 64


@pytest.mark.parametrize(
    ("name", "count"),
    [("llama3_1_8b", 8_030_261_248), ("llama3_1_70b", 70_553_706_496),
     ("llama3_1_405b", 405_853_388_800), ("llama3_2_1b", 1_235_814_400)],
)  # fmt: skip
def test_shapes_have_the_published_sizes(name, count):
    path = str(BASE.parent / "shapes" / f"{name}.json")
    model = causal_lm.from_hf(open_model.open_config(path), path, dtype="float32")
    total = 0
    for leaf in model.flat_infos.values():
        size = 1
        for n in leaf.shape:
            size *= n
        total += size
    assert total == count
    assert dataclasses.is_dataclass(model.config)


def test_commands_of_the_plans_can_be_parsed(monkeypatch):
    """docs/plans.md, from the root of a clone."""
    root = BASE.parent.parent
    monkeypatch.chdir(root)
    text = (root / "docs" / "plans.md").read_text("utf-8").replace("\\\n", " ")
    commands = re.findall(r"^python -m purelora.estimate (.*)$", text, re.MULTILINE)
    parsed = [estimate._parse(shlex.split(command)) for command in commands]
    layers = [open_model.open_config(c.model.path)["num_hidden_layers"] for _, c in parsed]
    assert layers == [32, 80, 126, 126, 30]
    assert [options.devices for options, _ in parsed] == [None, 16, 128, 128, None]
    for _, c in parsed:
        assert c.quant.qtype == "int8"
        assert c.quant.skip == (("embed_tokens",) if c.mesh.expert > 1 else ())
