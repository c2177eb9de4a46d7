"""The parameters as a model sees them: base, adapters and gathers joined, one `Module` a place.

`bind` is called at the start of a forward pass, inside the differentiated function. What it returns
is a pytree: `lax.scan` over it slices every array of a stack and leaves the static fields alone,
and `layer_axis.layer_of` does the same for one layer.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from purelora.core import layer_axis, param_info, trees
from purelora.core.paths import Path
from purelora.lora import adapters, kinds, targets
from purelora.ops import quant
from purelora.sharding import parallel as parallel_lib


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "bias", "adapters"],
    meta_fields=[
        "name", "gather", "keep_gathered", "parallel", "exchange", "contracting", "frozen",
    ],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Module:
    """The parameters of one place in the model.

    Attributes:
      weight: this device's shard of the weight; a quantised one is a QArray.
      bias: `[N]`, or None.
      adapters: what is trained beside the weight, one entry a kind; the last is applied first.
      name: tree path of the module.
      gather: makes a shard of the weight whole, but for what `parallel` says.
      keep_gathered: whether the gathered weight is kept for the backward pass, instead of being
        gathered again there.
      parallel: how the weight is split for the matmul itself.
      exchange: how tokens reach the experts that other devices hold; only of experts' weights.
      contracting: dimension of the weight that a matmul sums over; None for a vector.
      frozen: whether the weight is not trained, so that no gradient of it is formed.
    """

    weight: Any
    bias: jax.Array | None
    adapters: tuple[kinds.Bound, ...]
    name: str
    gather: quant.Gather
    keep_gathered: bool
    parallel: parallel_lib.Parallel
    exchange: parallel_lib.Exchange
    contracting: int | None
    frozen: bool

    @property
    def frozen_operand(self) -> tuple[quant.Weight, quant.Gather]:
        """What a matmul with the frozen weight takes: a shard, and the gather that makes it whole.

        The matmul keeps its operand for the backward pass. With `keep_gathered` that is the whole
        weight, gathered here, and nothing is left to gather.
        """
        if not self.keep_gathered:
            return self.weight, self.gather
        return checkpoint_name(self.gather(self.weight), "gathered"), parallel_lib.whole


def bind(
    base: Mapping[str, Any],
    trainable: Mapping[str, Any],
    *,
    infos: Mapping[str, param_info.ParamInfo],
    adaptation: targets.Adaptation,
    shards: parallel_lib.Shards = parallel_lib.NO_SHARDS,
) -> trees.Tree:
    """Joins the frozen and the trainable tree into one tree of `Module`s.

    Args:
      base: frozen leaves.
      trainable: trained leaves; adapters or weights, never a path that `base` has.
      infos: flat declarations of the unquantised weights.
      adaptation: what is trained beside the base; nothing when all weights are.
      shards: how the leaves lie on the devices.
    """
    trained = trees.flatten(trainable)
    leaves: dict[str, Any] = {**trees.flatten(base), **trained}
    modules: dict[str, Module] = {}
    for path in dict.fromkeys(Path(leaf).parent for leaf in leaves):
        weight, bias = f"{path}.weight", f"{path}.bias"
        modules[path] = Module(
            weight=leaves.get(weight),
            bias=shards.gathers.get(bias, parallel_lib.whole)(leaves.get(bias)),
            adapters=_adapters(path, leaves, infos, adaptation),
            name=path,
            gather=shards.gathers.get(weight, parallel_lib.whole),
            keep_gathered=shards.keep_gathered and weight in shards.gathers,
            parallel=shards.parallels.get(path, parallel_lib.WHOLE),
            exchange=shards.exchanges.get(path, parallel_lib.ALONE),
            contracting=infos[weight].contracting if weight in infos else None,
            frozen=weight not in trained,
        )
    return trees.unflatten(modules)


def _adapters(
    path: Path,
    leaves: Mapping[str, Any],
    infos: Mapping[str, param_info.ParamInfo],
    adaptation: targets.Adaptation,
) -> tuple[kinds.Bound, ...]:
    """What is trained beside the weight of one module, spread over its stack."""
    bound = []
    if path in adaptation.targets:
        target = adaptation.targets[path]
        stack = infos[path / "weight"].shape[0] if target.layers else None
        bound.append(adapters.bind(path, target, leaves, stack))
    rows = leaves.get(path / kinds.TOKEN_ROWS.leaves[0])
    if rows is not None:
        bound.append(kinds.TOKEN_ROWS.bound(rows, adaptation.token_ids))
    return tuple(bound)


def split_weights(stack: trees.Tree) -> tuple[dict[str, quant.Weight], trees.Tree]:
    """Takes the frozen weights out of a stack of bound modules.

    Returns:
      The frozen weights `[L, ...]` by module path, and the modules, with None in their place.
    """
    flat = trees.flatten(stack)
    frozen = {p: m.weight for p, m in flat.items() if m.frozen and m.weight is not None}
    rest = {p: dataclasses.replace(m, weight=None) if p in frozen else m for p, m in flat.items()}
    return frozen, trees.unflatten(rest)


def with_weights(
    modules: trees.Tree, frozen: Mapping[str, quant.Weight], position: jax.Array
) -> trees.Tree:
    """Puts back what `split_weights` took out, for one layer.

    Args:
      modules: one layer's modules.
      frozen: the frozen weights of the whole stack, `[L, ...]`, by module path.
      position: int32 position of the layer in the stack.
    """
    flat = trees.flatten(modules)
    for path, stack in frozen.items():
        weight = layer_axis.layer_of(stack, position)
        flat[path] = dataclasses.replace(flat[path], weight=weight)
    return trees.unflatten(flat)
