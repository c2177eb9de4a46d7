"""The ready configs of large models: the small variant of each is run, as its document says."""

import json
import math

import pytest
import safetensors.numpy

from purelora.commands import train
from purelora.config import command_line
from tests.support import runs

CONFIGS = runs.REPO / "configs"
# Devices along `expert` in the mesh of the large run.
READY = {
    "llama3_1_8b_qlora": 1,
    "qwen3_8b_qlora": 1,
    "gemma3_4b_lora": 1,
    "gemma4_26b_qlora": 4,
    "mixtral_8x7b_qlora": 4,
}


def shape_of(name: str, folder: str) -> dict:
    return json.loads((CONFIGS / folder / f"{name.rpartition('_')[0]}.json").read_text())


def settings(name: str):
    return command_line.parse([f"--config={CONFIGS}/{name}.py"], flags=()).config


@pytest.mark.parametrize("name", READY)
def test_the_small_variant_trains_and_leaves_an_adapter(name, tmp_path):
    expert = settings(name).mesh.expert
    assert expert == READY[name]
    mesh = [f"--config.mesh.expert={expert}"] if expert > 1 else []
    path = f"--config={CONFIGS}/{name}.py:small"
    assert train.main([path, f"--config.workdir={tmp_path / 'run'}", *mesh]) == 0
    steps = runs.records(tmp_path / "run", "train")
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert all(record["applied"] and record["grad_norm"] > 0 for record in steps)
    first, last = (record["loss"] for record in runs.records(tmp_path / "run", "eval"))
    # Random weights know nothing: the loss begins near that of guessing evenly.
    assert last < first < math.log(2048) + 0.2
    assert all((record["router_aux_loss"] is not None) == (expert > 1) for record in steps)
    adapter = tmp_path / "run" / "adapter" / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(adapter)
    layers = {int(tensor.split(".layers.")[1].split(".")[0]) for tensor in tensors}
    assert layers == set(range(shape_of(name, "shapes/small")["num_hidden_layers"]))


@pytest.mark.parametrize("name", READY)
def test_the_small_shape_is_the_large_one_made_small(name):
    """Sizes differ, and nothing else."""
    large, small = shape_of(name, "shapes"), shape_of(name, "shapes/small")
    assert large.keys() == small.keys()
    differing = {key for key in large if large[key] != small[key]}
    assert all(isinstance(large[key], int) or key == "layer_types" for key in differing), differing
