"""Runs, and steps taken out of them, for the scripts of benchmarks/.

JAX is imported by the functions alone, since its devices are chosen by the environment before.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SHAPES = ROOT / "configs" / "shapes"


def use_virtual_devices(count: int) -> None:
    """Makes the CPU look like so many devices; to be called before JAX is imported."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def begin_smoke() -> None:
    """Lets this process and its children compile quickly; to be called before JAX is imported.

    A smoke run shows that a script works, not how fast anything is.
    """
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"


def settings(config: str, keys: Mapping[str, Any]) -> Any:
    """The configuration that `--config=configs/CONFIG.py --config.KEY=VALUE ...` gives."""
    from purelora.config import command_line

    overrides = [f"--config.{key}={value}" for key, value in keys.items()]
    path = ROOT / "configs" / f"{config}.py"
    return command_line.parse([f"--config={path}", *overrides], flags=()).config


def sizes(shape: pathlib.Path, layers: int | None = None) -> dict[str, Any]:
    """A config.json, with another number of layers if asked for.

    The kinds of the layers are then those of the model's own order, whatever their number.
    """
    hf_config = json.loads(shape.read_text())
    if layers is None:
        return hf_config
    kept = {key: value for key, value in hf_config.items() if key != "layer_types"}
    return {**kept, "num_hidden_layers": layers}


class AbstractStep(NamedTuple):
    """The jitted step of a plan, and its arguments as shapes."""

    step: Any
    arguments: Any

    def lower(self) -> Any:
        return self.step.lower(*self.arguments)


def abstract_step(plan: Any, schedule_steps: int = 100) -> AbstractStep:
    """The step that `python -m purelora.train` compiles, without arrays."""
    from purelora.analysis import step_bytes
    from purelora.training import optimisers, programs

    tx = optimisers.transformation(plan.config.optim, plan.trainable_infos)
    step = programs.train_step(plan, programs.layout_of(plan, tx), tx, schedule_steps)
    return AbstractStep(step, step_bytes.abstract_arguments(plan))


class ReadyStep(NamedTuple):
    """A jitted step with the state and the base that it takes."""

    step: Any
    state: Any
    base: Any


def ready_step(plan: Any, base: Any, trainable: Any) -> ReadyStep:
    """The step of a run that begins with these leaves; it takes over the trained ones."""
    from purelora.training import optimisers, programs

    tx = optimisers.transformation(plan.config.optim, plan.trainable_infos)
    layout = programs.layout_of(plan, tx)
    state = programs.fresh_state(plan, layout, tx, trainable)
    return ReadyStep(programs.train_step(plan, layout, tx, schedule_steps=100), state, base)


def loaded_step(config: Any) -> tuple[Any, ReadyStep]:
    """The plan and the step of a run of its own model, with the weights read."""
    from purelora.training import beginning, setup

    model, plan = setup.open_and_plan(config, quiet)
    begun = beginning.begin_fresh(model, plan, quiet)
    return plan, ready_step(plan, begun.base, begun.trainable)


def quiet(text: str) -> None:
    """Says nothing."""


def full_batch(rows: int, length: int, vocab: int) -> Any:
    """One micro-batch of random tokens without padding, every token a target."""
    import numpy as np

    from purelora.core.batch import Batch

    tokens = np.random.default_rng(0).integers(0, vocab, (1, rows, length + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (1, rows, length))
    return Batch(
        tokens=tokens[..., :-1],
        targets=tokens[..., 1:],
        weights=np.ones((1, rows, length), np.float32),
        segment_ids=np.ones((1, rows, length), np.int32),
        positions=np.ascontiguousarray(positions),
    )
