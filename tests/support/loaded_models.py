"""A model from its files, and what it computes."""

import jax
import numpy as np

from purelora.core import trees
from purelora.interop import builtin
from purelora.models import causal_lm
from purelora.sharding import specs
from purelora.weights import load as weights_load
from tests.support import tiny


def loaded(path: str) -> tuple[causal_lm.CausalLM, trees.Tree]:
    opened = builtin.open_model(path)
    model = causal_lm.from_hf(opened.source.config, path, dtype="float32")
    mesh = tiny.mesh()
    placed = specs.shardings(specs.spec_tree(model.infos, mesh), mesh)
    return model, weights_load.load(opened.source, model, model.infos, placed).tree


def logits(model: causal_lm.CausalLM, trainable: trees.Tree, base: trees.Tree) -> np.ndarray:
    ids = np.random.default_rng(2).integers(0, 259, (2, 7))
    kept = {p: leaf for p, leaf in trees.flatten(base).items() if p not in model.adaptation.full}
    run = jax.jit(lambda t, b: model.logits(t, b, tiny.inputs(ids)))
    return np.asarray(run(trainable, trees.unflatten(kept)))
