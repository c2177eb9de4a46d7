"""Runs the layers of a model one after the other, scanned or unrolled."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import layer_axis, trees
from purelora.models import params
from purelora.models import stacks as stack_lib
from purelora.models.stacks import Run, Stack

# What `remat="none"` keeps for the backward pass, by checkpoint name: the results of the large
# matmuls and of attention, and gathered weights where that is asked for. Norms, rotations and
# activations are recomputed from them, which costs nothing that can be measured and halves the
# memory.
SAVED_NAMES = (
    "attention_query", "attention_key", "attention_value", "attention_out", "attention_lse",
    "after_attention", "attention_added", "mlp_gate", "mlp_up", "mlp_added", "lora_xa", "gathered",
)  # fmt: skip

Kind = int | jax.Array


class Layer(NamedTuple):
    """One layer, as the body of the loop gets it.

    The frozen weights come as whole stacks and are sliced inside the body: a slice that is taken
    outside of what `jax.checkpoint` recomputes would be saved for the backward pass.

    Attributes:
      frozen: frozen weights of the whole stack `[L, ...]`, by module path; empty when unrolled.
      own: the layer's modules, without the weights that are in `frozen`.
      position: int32 position of the layer in its stack.
      number: int32 number of the layer in the model.
      given: the layer's slice of `run`'s argument `given`.
      is_real: whether there is such a layer; if not, it is skipped. None if all are real.
    """

    frozen: dict[str, Any]
    own: trees.Tree
    position: jax.Array
    number: jax.Array
    given: Any
    is_real: jax.Array | None = None

    @property
    def bound(self) -> trees.Tree:
        """All of the layer's modules, with their weights."""
        return params.with_weights(self.own, self.frozen, self.position)


# (carry, layer, index of its kind in `Config.kinds` of its stack, index of the stack) -> (carry, y)
# Where the layer is not real the carry stays as it is, see `skipping`.
Body = Callable[[Any, Layer, Kind, int], tuple[Any, Any]]


def of_kind(kind: Kind, options: Sequence[Any]) -> Any:
    """The one of `options` (pytrees) with index `kind`; a traced index selects array by array."""
    if isinstance(kind, int):
        return options[kind]
    return jax.tree.map(lambda *arrays: jax.lax.select_n(kind, *arrays), *options)


def if_real(layer: Layer, one: Any, other: Any) -> Any:
    """`one` if the layer is real, else `other`: pytrees of the same shapes."""
    is_real = layer.is_real
    if is_real is None:
        return one
    return jax.tree.map(lambda *arrays: jnp.where(is_real, *arrays), one, other)


def skipping(body: Body) -> Body:
    """`body`, which leaves the carry as it is and has a y of zeros where the layer is not real.

    It belongs inside of `rematted`. Outside, jax 0.10 saves all that a branch is given, for every
    layer: whole stacks of weights.
    """

    def run(carry: Any, layer: Layer, kind: Kind, stack: int) -> tuple[Any, Any]:
        if layer.is_real is None:
            return body(carry, layer, kind, stack)

        def taken() -> tuple[Any, Any]:
            return body(carry, layer, kind, stack)

        skipped = carry, jax.tree.map(jnp.zeros_like, jax.eval_shape(taken)[1])
        out: tuple[Any, Any] = jax.lax.cond(layer.is_real, taken, lambda: skipped)
        return out

    return run


def rematted(body: Body, *, scan: bool, remat: bool) -> Body:
    """`body` under `jax.checkpoint`: all of it is recomputed in the backward pass if `remat`.

    Without `remat` only the values of `SAVED_NAMES` are kept, and what is cheap is recomputed.
    """
    policy = None if remat else jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)

    def run(carry: Any, layer: Layer, kind: Kind, stack: int) -> tuple[Any, Any]:
        # Without this, `jax.checkpoint` would trace an int kind.
        static = (2, 3) if isinstance(kind, int) else (3,)
        # A scan body cannot be merged with its recomputation by CSE, so no barrier is needed there.
        once = jax.checkpoint(body, prevent_cse=not scan, policy=policy, static_argnums=static)
        out: tuple[Any, Any] = once(carry, layer, kind, stack)
        return out

    return run


def run(
    body: Body,
    carry: Any,
    stacks: Sequence[Stack],
    bound: Sequence[trees.Tree],
    *,
    given: Any = None,
    scan: bool,
) -> tuple[Any, Any]:
    """Runs `carry, y = body(carry, layer, kind, stack)` through all layers of a model, in order.

    The kind of a layer is an int, unless a stack with layers of several kinds is scanned. These
    layers share one compiled body, in which the kind is a traced number.

    Args:
      body: one layer. What it closes over must not depend on the layer.
      carry: what the first layer gets as its carry.
      stacks: the stacks of the model.
      bound: the bound modules of each stack, with a leading layer axis.
      given: pytree of further inputs of the layers, `[L, ...]` over all layers of the model.
      scan: compile one body for each repeated part of the layers' order, see `stacks`; or every
        layer by itself.

    Returns:
      The last layer's carry; and the y of all layers whose y is not None, stacked in the order of
      the layers (None if there are none).
    """
    if not scan:
        return _unrolled(body, carry, stacks, bound, given)
    split = [params.split_weights(tree) for tree in bound]

    def one(carry: Any, xs: Any, stack: int) -> tuple[Any, Any]:
        layer, kind = xs
        kinds = stacks[stack].cfg.kind_numbers
        kind = kind if len(set(kinds)) > 1 else kinds[0]
        return body(carry, layer._replace(frozen=split[stack][0]), kind, stack)

    def leading(stack: Stack, own: trees.Tree) -> tuple[Layer, jax.Array]:
        ints = (range(len(stack.layers)), stack.layers, stack.cfg.kind_numbers)
        position, number, kind = (jnp.asarray(numbers, jnp.int32) for numbers in ints)
        is_all = len(stacks) == 1
        more = given if is_all else jax.tree.map(lambda a: a[np.asarray(stack.layers)], given)
        return Layer({}, own, position, number, more), kind

    xs = [leading(stack, own) for stack, (_, own) in zip(stacks, split, strict=True)]
    runs = stack_lib.runs(stack_lib.numbers(stacks))
    carry, ys = _scanned(one, runs, carry, dict(enumerate(xs)))
    return carry, _in_order([ys[n] for n in range(len(stacks))], stacks)


def _unrolled(
    body: Body, carry: Any, stacks: Sequence[Stack], bound: Sequence[trees.Tree], given: Any
) -> tuple[Any, Any]:
    ys = []
    places = [iter(range(len(stack.layers))) for stack in stacks]
    for number, stack in enumerate(stack_lib.numbers(stacks)):
        position = next(places[stack])
        own = layer_axis.layer_of(bound[stack], position)
        more = layer_axis.layer_of(given, number)
        layer = Layer({}, own, jnp.int32(position), jnp.int32(number), more)
        carry, y = body(carry, layer, stacks[stack].cfg.kind_numbers[position], stack)
        ys += [] if y is None else [y]
    return carry, jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *ys) if ys else None


def _scanned(
    one: Callable[..., tuple[Any, Any]],
    runs: Sequence[Run],
    carry: Any,
    xs: dict[int, Any],
) -> tuple[Any, dict[int, Any]]:
    """Scans over runs, and calls itself for runs within them.

    A run of a single layer is a scan too, of length 1. Slicing that layer off would save the slice
    for the backward pass, and XLA does not compile such a scan as a loop.

    Where the last repetition is only a part, its other rows are zeros and not real.

    Args:
      one: one layer, as the body of `lax.scan`.
      runs: the layers' order.
      carry: what the first layer gets.
      xs: inputs of the layers of each stack, stacked, by the index of the stack.

    Returns:
      The last carry; and the y of the layers of each stack, stacked, by the index of the stack.
    """
    used = dict.fromkeys(xs, 0)
    ys: dict[int, list[Any]] = {stack: [] for stack in xs}
    for run in runs:
        counts, parts = stack_lib.counts(run), {}
        for stack, (rows, real) in counts.items():
            parts[stack] = _filled(_part(xs[stack], used[stack], real), real, rows)
            used[stack] += real
        if isinstance(run.body, int):
            body = functools.partial(one, stack=run.body)
            carry, y = jax.lax.scan(body, carry, parts[run.body])
            ys[run.body].append(y)
            continue
        nested = functools.partial(_scanned, one, run.body)
        carry, of_run = jax.lax.scan(nested, carry, jax.tree.map(_fold(run.times), parts))
        for stack, y in of_run.items():
            y = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), y)
            ys[stack].append(_part(y, 0, counts[stack].real))
    joined = {
        stack: jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *found)
        for stack, found in ys.items()
    }
    return carry, joined


def _fold(count: int) -> Callable[[jax.Array], jax.Array]:
    return lambda a: a.reshape(count, -1, *a.shape[1:])


def _part(xs: Any, start: int, count: int) -> Any:
    """The `count` layers from `start` on; a whole stack is not copied."""

    def cut(array: jax.Array) -> jax.Array:
        is_all = array.shape[0] == count
        return array if is_all else jax.lax.slice_in_dim(array, start, start + count)

    return jax.tree.map(cut, xs)


def _filled(xs: tuple[Layer, jax.Array], real: int, rows: int) -> tuple[Layer, jax.Array]:
    """The `real` layers with rows behind them that are not, `rows` in all."""
    if real == rows:
        return xs

    def fill(array: jax.Array) -> jax.Array:
        return jnp.pad(array, [(0, rows - real), *([(0, 0)] * (array.ndim - 1))])

    layer, kind = jax.tree.map(fill, xs)
    return layer._replace(is_real=jnp.arange(rows) < real), kind


def _in_order(ys: Sequence[Any], stacks: Sequence[Stack]) -> Any:
    """The y of each stack's layers as one, in the order of the layers in the model."""
    having = [n for n, y in enumerate(ys) if jax.tree.leaves(y)]
    if len(having) < 2:
        return ys[having[0]] if having else None
    order = np.argsort([layer for n in having for layer in stacks[n].layers])
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays)[order], *(ys[n] for n in having))
