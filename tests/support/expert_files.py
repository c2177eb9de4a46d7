"""Experts as stacks of random leaves and as the tensors of files, spelled out by hand."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from purelora.core import trees
from purelora.models import causal_lm
from purelora.sharding import specs

MATRICES = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def stacks(m: causal_lm.CausalLM, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random leaves by path."""
    draw = np.random.default_rng(3)
    return {
        path: draw.normal(0, 0.2, leaf.shape).astype(dtype) for path, leaf in m.flat_infos.items()
    }


def in_files(leaves: dict[str, np.ndarray], family: str, layout: str) -> dict[str, np.ndarray]:
    """The tensors that hold the leaves, spelled out by hand."""
    arrays: dict[str, np.ndarray] = {}
    own = layout == "own" and family == "mixtral"
    block, names = ("block_sparse_moe", MIXTRAL) if own else ("mlp", {n: n for n in MATRICES})
    for path, leaf in leaves.items():
        module, _, kind = path.rpartition(".")
        if not path.startswith("layers."):
            arrays[path if module == "lm_head" else f"model.{path}"] = leaf
            continue
        for layer, values in enumerate(leaf):
            where = f"model.layers.{layer}."
            if ".experts." not in path:
                name = path.removeprefix("layers.").replace("mlp.gate.", f"{block}.gate.")
                arrays[where + name.replace("sinks.weight", "sinks")] = values.T
            elif layout == "own":
                matrix = names[module.rpartition(".")[2]]
                for expert, weight in enumerate(values):
                    arrays[f"{where}{block}.experts.{expert}.{matrix}.weight"] = weight.T
    if layout == "fused":
        gate, up, down = (leaves[f"layers.mlp.experts.{n}.weight"] for n in MATRICES)
        joined = np.concatenate([gate, up], axis=3)
        for layer in range(len(gate)):
            where = f"model.layers.{layer}.mlp.experts"
            arrays[f"{where}.gate_up_proj"] = joined[layer].swapaxes(1, 2)
            arrays[f"{where}.down_proj"] = down[layer].swapaxes(1, 2)
    for kind, end in (("weight", ""), ("bias", "_bias")) if layout == "interleaved" else ():
        gate, up, down = (leaves[f"layers.mlp.experts.{n}.{kind}"] for n in MATRICES)
        joined = np.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)
        for layer in range(len(gate)):
            where = f"model.layers.{layer}.mlp.experts"
            arrays[f"{where}.gate_up_proj{end}"] = joined[layer]
            arrays[f"{where}.down_proj{end}"] = down[layer]
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def shardings(m: causal_lm.CausalLM, infos: trees.Tree, mesh: Any, experts: str | None) -> Any:
    """Shardings by the usual rules; with `experts`, that mesh axis splits the experts instead."""
    flat = trees.flatten(specs.shardings(specs.spec_tree(infos, mesh), mesh))

    def over(sharding):
        kept = (None if axis == experts else axis for axis in sharding.spec[2:])
        return NamedSharding(mesh, P(None, experts, *kept))

    if experts is not None:
        for path in [p for p in flat if ".experts." in p]:
            flat[path] = jax.tree.map(over, flat[path])
    return trees.unflatten(flat)
