"""Runs of the main command on the tiny built-in model, and what they leave behind."""

import json
import pathlib
from typing import Any

import jax
import numpy as np

from purelora.checkpoint import store
from purelora.commands import train
from purelora.config import command_line
from purelora.training import setup

REPO = pathlib.Path(__file__).parents[2]
TINY = f"--config={REPO}/configs/tiny.py"
# In which another process must have got somewhere, on a machine that is busy with other things.
PATIENCE_SECS = 900
BASE = ("--config.accum_steps=1", "--config.max_length=64", "--config.data.eval_fraction=0.01")


def run(workdir: pathlib.Path, *arguments: str) -> int:
    return train.main([TINY, f"--config.workdir={workdir}", *BASE, *arguments])


def records(workdir: pathlib.Path, kind: str) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def built(workdir: pathlib.Path, *arguments: str):
    """A run that is ready to go, and its state."""
    settings = command_line.parse(
        [TINY, f"--config.workdir={workdir}", *BASE, *arguments], flags=()
    ).config
    model, plan = setup.open_and_plan(settings, str)
    return setup.build(model, plan, str)


def saved_state(workdir: pathlib.Path, *arguments: str):
    """The state in a run's newest checkpoint, through the same path as a resumed run."""
    return built(workdir, "--config.checkpoint.resume=must", *arguments)[1]


def saved_leaves(workdir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """The state that a run saved at a step, by dotted path, as it lies on disk."""
    checkpoints = store.to_read(workdir / "checkpoints")
    leaves = checkpoints.leaves(step, "state")
    checkpoints.close()
    return leaves


def bits(leaf: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)
