"""Checkpoints that transformers has made, with its model and ours."""

import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest

from purelora.core import trees
from purelora.models import causal_lm
from purelora.sharding import specs
from purelora.weights import hf_folder
from purelora.weights import load as weights_load
from tests.support import families, tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LENGTH = 24


class Made(NamedTuple):
    """A checkpoint, the model of transformers that is in it, and ours."""

    folder: pathlib.Path
    theirs: Any
    model: causal_lm.CausalLM
    base: trees.Tree


@pytest.fixture(scope="module", params=families.CONFIGS)
def made(request, tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("checkpoint")
    config = tiny.hf_config(request.param)
    transformers_config = transformers.AutoConfig.for_model(**config)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers_config, attn_implementation="eager"
    ).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if name.endswith("q_norm.weight") and theirs.config.model_type == "gemma4_text":
                parameter *= parameter.shape[0] ** -0.5  # The factor of the scores is in here.
            # Norms near what they begin with; weights that keep the activations' size.
            size = parameter.abs().mean() if parameter.any() else 1.0
            parameter += 0.1 * noise * size if parameter.ndim == 1 else 0.0
            if name.endswith("sinks"):
                parameter.copy_(noise)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for name, buffer in theirs.named_buffers():
            if name.endswith("layer_scalar"):
                buffer += 0.2 * torch.randn(buffer.shape, generator=draw)
    theirs.save_pretrained(folder)
    return Made(folder, theirs, *loaded(folder))


def loaded(folder: pathlib.Path) -> tuple[causal_lm.CausalLM, trees.Tree]:
    source = hf_folder.open_folder(str(folder))
    model = causal_lm.from_hf(source.config, str(folder), dtype="float32")
    mesh = tiny.mesh()
    placed = specs.shardings(specs.spec_tree(model.infos, mesh), mesh)
    return model, weights_load.load(source, model, model.infos, placed).tree


def their_logits(theirs: Any, tokens: np.ndarray, **more: np.ndarray) -> np.ndarray:
    given = {name: torch.tensor(array).long() for name, array in more.items()}
    with torch.no_grad():
        return theirs(torch.tensor(tokens).long(), **given).logits.numpy()
