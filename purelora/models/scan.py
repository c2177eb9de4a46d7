"""Runs the layers of a model one after the other, scanned or unrolled."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import layer_axis, trees
from purelora.models import params, stacks
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
      is_real: whether it is a layer of the model, and not a padding layer, which is skipped. None
        if all are real.
      kind: int32 number of its kind among `Config.kinds` of its stack; None if the body knows it.
    """

    frozen: dict[str, Any]
    own: trees.Tree
    position: jax.Array
    number: jax.Array
    given: Any
    is_real: jax.Array | None = None
    kind: jax.Array | None = None

    @property
    def bound(self) -> trees.Tree:
        """All of the layer's modules, with their weights."""
        return params.with_weights(self.own, self.frozen, self.position)

    def kind_number(self, static: int | None) -> Kind:
        """The number of its kind: `static`, which the body knows, or `kind`."""
        if static is not None:
            return static
        assert self.kind is not None
        return self.kind


# (carry, layer) -> (carry, y)
Body = Callable[[Any, Layer], tuple[Any, Any]]
# (index of the stack, number of the layer's kind among `Config.kinds` of the stack) -> the body of
# such a layer. None in place of the kind: layers of all kinds share the body, see `Layer.kind`.
Bodies = Callable[[int, int | None], Body]


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

    Only models with padding layers need it, see `stacks.is_padded`. It belongs inside of
    `rematted`. Outside, jax 0.10 saves all that a branch is given, for every layer: whole stacks of
    weights.
    """

    def run(carry: Any, layer: Layer) -> tuple[Any, Any]:
        if layer.is_real is None:
            return body(carry, layer)

        def taken() -> tuple[Any, Any]:
            return body(carry, layer)

        skipped = carry, jax.tree.map(jnp.zeros_like, jax.eval_shape(taken)[1])
        out: tuple[Any, Any] = jax.lax.cond(layer.is_real, taken, lambda: skipped)
        return out

    return run


def rematted(body: Body, *, scan: bool, remat: bool) -> Body:
    """`body` under `jax.checkpoint`: all of it is recomputed in the backward pass if `remat`.

    Without `remat` only the values of `SAVED_NAMES` are kept, and what is cheap is recomputed.
    """
    policy = None if remat else jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
    # A scan body cannot be merged with its recomputation by CSE, so no barrier is needed there.
    checkpointed: Body = jax.checkpoint(body, prevent_cse=not scan, policy=policy)
    return checkpointed


def run(
    bodies: Bodies,
    carry: Any,
    model: Sequence[Stack],
    bound: Sequence[trees.Tree],
    *,
    given: Any = None,
    scan: bool,
) -> tuple[Any, Any]:
    """Runs `carry, y = body(carry, layer)` through all layers of a model, in order.

    Each kind of layers has a body of its own, unless a stack with layers of several kinds is
    scanned: these share one compiled body, in which the kind is a traced number.

    Args:
      bodies: the body of each kind of layers. What it closes over must not depend on the layer.
      carry: what the first layer gets as its carry.
      model: the stacks of the model.
      bound: the bound modules of each stack, with a leading layer axis.
      given: pytree of further inputs of the layers, `[L, ...]` over all layers of the model.
      scan: compile one body for each repeated part of the layers' order, see `stacks`; or every
        layer by itself.

    Returns:
      The last layer's carry; and the y of all layers whose y is not None, stacked in the order of
      the layers (None if there are none).
    """
    if not scan:
        return _unrolled(bodies, carry, model, bound, given)
    split = [params.split_weights(tree) for tree in bound]

    def one(carry: Any, layer: Layer, stack: int) -> tuple[Any, Any]:
        kinds = model[stack].cfg.kind_numbers
        layer = layer._replace(frozen=split[stack][0])
        if len(set(kinds)) > 1:
            return bodies(stack, None)(carry, layer)
        return bodies(stack, kinds[0])(carry, layer._replace(kind=None))

    def leading(stack: Stack, own: trees.Tree) -> Layer:
        ints = (range(len(stack.layers)), stack.layers, stack.cfg.kind_numbers)
        position, number, kind = (jnp.asarray(numbers, jnp.int32) for numbers in ints)
        is_all = len(model) == 1
        more = given if is_all else jax.tree.map(lambda a: a[np.asarray(stack.layers)], given)
        return Layer({}, own, position, number, more, kind=kind)

    xs = [leading(stack, own) for stack, (_, own) in zip(model, split, strict=True)]
    carry, ys = _scanned(one, stacks.runs(stacks.numbers(model)), carry, dict(enumerate(xs)))
    return carry, _in_order([ys[n] for n in range(len(model))], model)


def _unrolled(
    bodies: Bodies, carry: Any, model: Sequence[Stack], bound: Sequence[trees.Tree], given: Any
) -> tuple[Any, Any]:
    ys = []
    places = [iter(range(len(stack.layers))) for stack in model]
    for number, stack in enumerate(stacks.numbers(model)):
        position = next(places[stack])
        own = layer_axis.layer_of(bound[stack], position)
        more = layer_axis.layer_of(given, number)
        layer = Layer({}, own, jnp.int32(position), jnp.int32(number), more)
        carry, y = bodies(stack, model[stack].cfg.kind_numbers[position])(carry, layer)
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

    Where the last repetition is only a part, padding layers of zeros fill it up.

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
        counts, parts = stacks.counts(run), {}
        for stack, (rows, real) in counts.items():
            parts[stack] = _padded(_part(xs[stack], used[stack], real), real, rows)
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


def _padded(layers: Layer, real: int, rows: int) -> Layer:
    """The `real` layers with padding layers behind them, `rows` in all."""
    if real == rows:
        return layers

    def fill(array: jax.Array) -> jax.Array:
        return jnp.pad(array, [(0, rows - real), *([(0, 0)] * (array.ndim - 1))])

    padded: Layer = jax.tree.map(fill, layers)
    return padded._replace(is_real=jnp.arange(rows) < real)


def _in_order(ys: Sequence[Any], model: Sequence[Stack]) -> Any:
    """The y of each stack's layers as one, in the order of the layers in the model."""
    having = [n for n, y in enumerate(ys) if jax.tree.leaves(y)]
    if len(having) < 2:
        return ys[having[0]] if having else None
    order = np.argsort([layer for n in having for layer in model[n].layers])
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays)[order], *(ys[n] for n in having))
