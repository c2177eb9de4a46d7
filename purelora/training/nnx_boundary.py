"""The NNX boundary: the only module that imports flax.

A family's trees go into a real `nnx.Module` (`wrap`), come out of it as plain pytrees by a dynamic
filter (`split`), and trained pytrees go back (`merge`). Training gets its two trees through `split`
and in no other way. `from_nnx` does the same with a module of the user's own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

from purelora.core import errors, trees
from purelora.core.batch import Batch, Inputs
from purelora.core.paths import Path
from purelora.lora import kinds, targets
from purelora.models.loss import Losses
from purelora.training.step import Forward

# (trainable, base, inputs) -> logits; either tree may be empty.
Apply = Callable[[trees.Tree, trees.Tree, Inputs], jax.Array]


class Node(nnx.Module):
    """One level of a parameter tree: an attribute for each child or leaf."""

    def __init__(self, leaves: Mapping[str, Any], specs: Mapping[str, Any]):
        for name, value in leaves.items():
            setattr(self, name, _node_or_param(name, value, specs[name]))


class LanguageModel(Node):
    """A causal language model as an NNX module: calling it gives logits."""

    def __init__(self, leaves: Mapping[str, Any], specs: Mapping[str, Any], apply: Apply):
        super().__init__(leaves, specs)
        self.apply = apply

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Logits `[B, T, V]`; without positions and segments each row is one document."""
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        if segment_ids_BT is None:
            segment_ids_BT = jnp.ones_like(tokens_BT)
        parts: tuple[Any, ...] = nnx.split(self, nnx.LoRAParam, ...)
        adapters, base = parts[1], parts[2]
        inputs = Inputs(tokens_BT, positions_BT, segment_ids_BT)
        return self.apply(nnx.to_pure_dict(adapters), nnx.to_pure_dict(base), inputs)


def _node_or_param(name: str, value: Any, spec: Any) -> Node | nnx.Param:
    if isinstance(value, Mapping):
        return Node(value, spec)
    kind = nnx.LoRAParam if kinds.is_adapter(name) else nnx.Param
    codes_spec = spec.qvalue if isinstance(spec, qwix.QArray) else spec
    # The annotation is metadata here: the arrays are placed already, and no mesh is in scope.
    return kind(value, out_sharding=tuple(codes_spec), eager_sharding=False)


def wrap(base: trees.Tree, adapters: trees.Tree, specs: trees.Tree, apply: Apply) -> LanguageModel:
    """Puts trees into one NNX module: `lora_*` leaves as LoRAParam, all others as Param.

    Args:
      base: the base's leaves, quantised ones as QArrays.
      adapters: the adapters' leaves; empty without LoRA.
      specs: PartitionSpecs of all of them.
      apply: what a call computes.

    Raises:
      ValueError: the trees share a path.
    """
    return LanguageModel(trees.combine(base, adapters), specs, apply)


def trainable_filter(adaptation: targets.Adaptation | None) -> Any:
    """What is trained: the adapters and the leaves that are trained whole, or every parameter.

    Args:
      adaptation: what is trained beside the base; None if every weight is.
    """
    if adaptation is None:
        return nnx.Param

    def is_whole(path: tuple[Any, ...], value: Any) -> bool:
        del value
        return targets.is_trained(Path.of(map(str, path)), adaptation)

    return nnx.Any(nnx.LoRAParam, is_whole)


class Split(NamedTuple):
    """A module taken apart.

    Attributes:
      graphdef: its structure, static and hashable.
      trainable: plain nested dict of the leaves that the filter took.
      base: plain nested dict of the rest.
    """

    graphdef: nnx.GraphDef
    trainable: trees.Tree
    base: trees.Tree


def split(model: nnx.Module, trainable: Any, base: Any = ...) -> Split:
    """Takes a module apart into a trained and a frozen tree, disjoint and complete.

    Args:
      model: any NNX module whose leaves are all Params.
      trainable: NNX filter of the trained leaves. `LoRAParam` is a subclass of `Param`, so the
        filter `Param` takes adapters too.
      base: NNX filter of the frozen leaves, by default all the others.

    Raises:
      ConfigError: nothing is trained, adapters exist but the base is empty, a leaf matches both
        filters or none, or a leaf is not a Param.
    """
    flat = nnx.to_flat_state(nnx.state(model))
    leaves: dict[str, Any] = {_name(path): leaf for path, leaf in flat}
    _check_params(leaves)
    takes, rests = nnx.filterlib.to_predicate(trainable), nnx.filterlib.to_predicate(base)
    chosen: set[str] = {_name(path) for path, leaf in flat if takes(path, leaf)}
    if base is not ...:
        rest: set[str] = {_name(path) for path, leaf in flat if rests(path, leaf)}
        _check_partition(chosen, rest, set(leaves))
    if not chosen:
        raise errors.ConfigError(
            "trainable filter",
            str(trainable),
            "takes no leaf of the model, so nothing would train",
            f"the model has {len(leaves)} leaves, for example {next(iter(leaves), 'none')}",
        )
    has_adapters = any(isinstance(leaf, nnx.LoRAParam) for leaf in leaves.values())
    if has_adapters and len(chosen) == len(leaves):
        raise errors.ConfigError(
            "trainable filter",
            str(trainable),
            "takes adapters and base alike",
            "train adapters alone (nnx.LoRAParam), or a model without adapters",
        )
    parts: tuple[Any, ...] = nnx.split(model, trainable, ...)
    return Split(parts[0], _named(parts[1]), _named(parts[2]))


def merge(graphdef: nnx.GraphDef, trainable: trees.Tree, base: trees.Tree) -> nnx.Module:
    """The module again, from its structure and both trees."""
    leaves = trees.flatten(trees.combine(trainable, base))
    by_keys: dict[Any, Any] = {_keys(path): leaf for path, leaf in leaves.items()}
    return nnx.merge(graphdef, nnx.State.from_flat_path(by_keys))


class NnxModel(NamedTuple):
    """A module of the user's own as the train step takes it.

    Attributes:
      graphdef: its structure, static and hashable.
      trainable: plain nested dict of the leaves to train; numbers of lists are texts.
      base: plain nested dict of the frozen ones.
      forward: what `make_train_step` and `make_eval_step` take; it closes over `graphdef`.
    """

    graphdef: nnx.GraphDef
    trainable: trees.Tree
    base: trees.Tree
    forward: Forward


# (module, batch of [B, T] arrays, key or None outside training) -> weighted sum over the tokens
ModuleLoss = Callable[[Any, Batch, jax.Array | None], jax.Array]


def from_nnx(module: nnx.Module, loss: ModuleLoss, trainable: Any = nnx.LoRAParam) -> NnxModel:
    """Takes any NNX module apart for the train step, and says how its loss is computed.

    Args:
      module: any NNX module whose leaves are all Params, for example one that
        `qwix.apply_lora_to_model` has put adapters into. It is not changed.
      loss: the sum over a micro-batch's tokens of loss times `batch.weights`, a float32 scalar.
      trainable: NNX filter of the leaves to train: `nnx.LoRAParam`, `nnx.Param` for all, or any
        other. All other leaves are frozen.

    Raises:
      ConfigError: as `split`.
    """
    parts = split(module, trainable)

    def forward(
        trainable: trees.Tree,
        base: trees.Tree,
        batch: Batch,
        *,
        key: jax.Array | None,
        rows_B: jax.Array,
        row_weight: jax.Array,
    ) -> tuple[jax.Array, Losses]:
        del row_weight  # It is for losses that are means over rows.
        keys = None if key is None else jax.random.fold_in(key, rows_B[0])
        total = loss(merge(parts.graphdef, trainable, base), batch, keys)
        return total, Losses(total, None)

    return NnxModel(*parts, forward)


def _name(path: Sequence[Any]) -> Path:
    """The dotted name of a leaf; lists number their items."""
    return Path.of(map(str, path))


def _keys(name: Path) -> tuple[str | int, ...]:
    """The keys of a leaf by its dotted name: no attribute is called by a number."""
    return tuple(int(part) if part.isdecimal() else part for part in name.parts)


def _named(state: nnx.State) -> trees.Tree:
    """A state as a plain tree whose keys are all texts, as the trees of purelora are."""
    return trees.unflatten({_name(path): v.get_value() for path, v in nnx.to_flat_state(state)})


def _check_params(leaves: Mapping[str, Any]) -> None:
    others = [
        f"{n} ({type(v).__name__})" for n, v in leaves.items() if not isinstance(v, nnx.Param)
    ]
    if others:
        raise errors.ConfigError(
            "model",
            None,
            f"has leaves that are not parameters: {', '.join(others[:5])}",
            "remove them before training (random state is an argument of the step)",
        )


def _check_partition(chosen: set[str], rest: set[str], all_names: set[str]) -> None:
    both, neither = sorted(chosen & rest), sorted(all_names - chosen - rest)
    if both or neither:
        what = f"{len(both)} leaves match both filters, {len(neither)} match neither"
        raise errors.ConfigError(
            "trainable filter", None, what, f"for example {(both + neither)[0]}"
        )
