"""Runs on a mixture of experts from end to end: trained, resumed, exported, merged, built upon."""

import pathlib

import numpy as np
import pytest
import safetensors.numpy

from purelora.checkpoint import store
from purelora.commands import export, merge
from purelora.interop import builtin, open_model
from purelora.weights import hf_folder, hf_write
from tests.support import expert_files, loaded_models, runs, tiny

SIZES = {"vocab_size": 259, "num_hidden_layers": 2}
HOW = ("--config.data.eval_fraction=0", "--config.mesh.data=8", "--config.mesh.fsdp=1",
       "--config.optim.schedule_steps=4")  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> pathlib.Path:
    """A folder whose experts are joined, as transformers keeps them in memory."""
    folder = tmp_path_factory.mktemp("base")
    m = tiny.model("mixtral", **SIZES)
    arrays = expert_files.in_files(expert_files.stacks(m), "mixtral", "fused")
    companions = hf_write.tokenizer_files(builtin.tiny().tokenizer)
    tensors = {n: hf_write.safetensors_file.LazyTensor.of(array) for n, array in arrays.items()}
    config = tiny.hf_config("mixtral", **SIZES)
    hf_write.write_folder(str(folder), config, tensors, companions=companions)
    return folder


def leaves(run: pathlib.Path) -> dict[str, np.ndarray]:
    checkpoints, step = store.find(run)
    return checkpoints.trained(step)


@pytest.mark.slow
def test_adapters_on_a_quantised_mixture(base, tmp_path, capsys):
    options = (f"--config.model.path={base}", *HOW, "--config.quant.qtype=nf4",
               "--config.checkpoint.save_base=True")  # fmt: skip
    assert runs.run(tmp_path / "whole", *options, "--config.steps=4") == 0
    for steps in (2, 4):
        assert runs.run(tmp_path / "cut", *options, f"--config.steps={steps}") == 0
    found, wanted = leaves(tmp_path / "cut"), leaves(tmp_path / "whole")
    assert any(".experts.up_proj.lora_b" in path for path in wanted)
    assert all(np.array_equal(found[path], leaf) and leaf.any() for path, leaf in wanted.items())
    capsys.readouterr()
    arguments = [f"--run={tmp_path / 'whole'}", f"--output={tmp_path / 'adapter'}"]
    assert export.main(arguments) == 0
    # Its own checkpoint is the base too; merged into either, the experts change.
    for name, model, more in (("onto", base, ["--onto=dequantised"]),
                              ("run", tmp_path / "whole", [])):  # fmt: skip
        arguments = [f"--adapter={tmp_path / 'whole'}", f"--model={model}",
                     f"--output={tmp_path / name}", *more]  # fmt: skip
        assert merge.main(arguments) == 0
    one, other = (loaded_models.loaded(str(tmp_path / name)) for name in ("onto", "run"))
    np.testing.assert_allclose(
        loaded_models.logits(one[0], {}, one[1]),
        loaded_models.logits(other[0], {}, other[1]),
        atol=1e-5,
    )
    names = [set(hf_folder.open_folder(str(tmp_path / name)).shapes()) for name in ("onto", "run")]
    assert any("experts.gate_up_proj" in name for name in names[0])
    assert any("block_sparse_moe.experts.4.w1" in name for name in names[1])


@pytest.mark.slow
def test_all_weights_of_a_mixture(base, tmp_path):
    options = (f"--config.model.path={base}", *HOW, "--config.lora.enabled=False",
               "--config.quant.qtype=none", "--config.steps=2")  # fmt: skip
    assert runs.run(tmp_path / "run", *options) == 0
    assert merge.main([f"--model={tmp_path / 'run'}", f"--output={tmp_path / 'out'}"]) == 0
    opened = open_model.open_model(str(tmp_path / "run")).source
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == opened.shapes().keys()
    expert = leaves(tmp_path / "run")["layers.mlp.experts.down_proj.weight"][1, 3]
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    np.testing.assert_array_equal(written[name], expert.T)
    before = hf_folder.open_folder(str(base)).read("model.layers.1.mlp.experts.down_proj").array[3]
    assert (expert.T != before).any()
