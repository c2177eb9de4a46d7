"""LoRA adapters as pure functions of declarations and rules.

    base infos                                   adapter infos
    layers.self_attn.q_proj.weight [L, D, N]  ─▶ layers.self_attn.q_proj.lora_a [n, D, r]
                                                 layers.self_attn.q_proj.lora_b [n, r, N]
                                     with DoRA   layers.self_attn.q_proj.lora_magnitude [n, N]
    embed_tokens.weight [V, D]                ─▶ embed_tokens.lora_a [V, r], .lora_b [r, D]
    layers.mlp.experts.up_proj.weight         ─▶ layers.mlp.experts.up_proj.lora_a [n, E, D, r]
                               [L, E, D, F]      layers.mlp.experts.up_proj.lora_b [n, E, r, F]

A module computes `y = x W + scaling · (x A) B`. `n` is the number of layers of the stack that are
adapted: all L, unless the settings name only some. Then the adapters are stored for these layers
alone (so counts, gradients and exports hold nothing else) and spread over the stack when the
forward pass begins (`expand`).

Layers of one stack may have different ranks. Their adapters are stored with the largest; the rest
of `lora_a` and `lora_b` is zero in both, which makes the gradients of both exactly zero there, so
it stays zero without a mask.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from purelora.core import param_info, trees
from purelora.lora.targets import AdaptableModule, Target
from purelora.ops import quant


def adapter_infos(
    modules: Mapping[str, AdaptableModule], targets: Mapping[str, Target], *, init: str = "default"
) -> trees.Tree:
    """Declarations of `lora_a` [n, K, r] and `lora_b` [n, r, N] of every target, in float32.

    Of experts these are [n, E, K, r] and [n, E, r, N]: every expert has its own. K is the weight's
    contracting dimension and N the other one (for an embedding, rows and columns of the table);
    each takes the logical axis of the weight's dimension it comes from, so adapter specs follow the
    base kernel's spec axis by axis. With DoRA there is a `lora_magnitude` [n, N].

    Args:
      modules: what adapters can go to.
      targets: what they go to.
      init: "gaussian" for a normal `lora_a`; with everything else it is uniform.
    """
    flat: dict[str, param_info.ParamInfo] = {}
    for path, target in targets.items():
        weight = modules[path].weight
        k, n = weight.matrix_dims[::-1] if target.is_embedding else weight.matrix_dims
        lead: tuple[Any, Any] = ((len(target.layers),), ("layers",)) if target.layers else ((), ())
        if weight.has_experts:
            lead = ((*lead[0], weight.shape[-3]), (*lead[1], weight.axes[-3]))
        outer = param_info.ParamInfo(
            (*lead[0], weight.shape[n]), "float32", (*lead[1], weight.axes[n])
        )
        flat[f"{path}.lora_a"] = dataclasses.replace(
            outer,
            shape=(*lead[0], weight.shape[k], target.r),
            axes=(*lead[1], weight.axes[k], "rank"),
            contracting=-2,
            **_init_of_a(target, init),
        )
        flat[f"{path}.lora_b"] = dataclasses.replace(
            outer,
            shape=(*lead[0], target.r, weight.shape[n]),
            axes=(*lead[1], "rank", weight.axes[n]),
            contracting=-2,
            # As in PEFT it is the other factor of an embedding's adapter that begins at zero.
            **({"init": "normal", "std": 1.0} if target.is_embedding else {"init": "zeros"}),
        )
        if target.use_dora:
            flat[f"{path}.lora_magnitude"] = dataclasses.replace(outer, init="ones")
    return trees.unflatten(flat)


def _init_of_a(target: Target, init: str) -> dict[str, Any]:
    if target.is_embedding:
        return {"init": "zeros"}
    if init == "gaussian":
        return {"init": "normal", "std": 1 / target.r}
    return {"init": "he_uniform"}


def initial(infos: trees.Tree, targets: Mapping[str, Target], *, key: jax.Array) -> trees.Tree:
    """Initial values of adapters that do not depend on the weights; padding of ranks is zero.

    Magnitudes come out as ones: see `magnitudes`.
    """
    declared = trees.flatten(infos)
    flat = trees.flatten(param_info.initial_tree(infos, key=key))
    for path, target in targets.items():
        if len(set(target.ranks)) > 1:
            a, b = f"{path}.lora_a", f"{path}.lora_b"
            between = (1,) * (flat[a].ndim - 2)
            mask = rank_mask(target).reshape(-1, *between, target.r)
            # A normal lora_a has the deviation 1 / r of each layer's own rank.
            own = 1.0 if declared[a].std is None else target.r / mask.sum(-1, keepdims=True)
            flat[a] = flat[a] * (mask * own)
            flat[b] = flat[b] * mask.swapaxes(-1, -2)
    return trees.unflatten(flat)


def rank_mask(target: Target) -> np.ndarray:
    """`[n, r]`, 1 where a layer has that rank, 0 in its padding."""
    columns = np.arange(target.r)[None, :] < np.asarray(target.ranks)[:, None]
    return columns.astype(np.float32)


def count(infos: trees.Tree, targets: Mapping[str, Target]) -> int:
    """Number of trained elements; the padding of ranks is none."""
    total = 0
    for path, leaf in trees.flatten(infos).items():
        module, _, name = path.rpartition(".")
        size = int(np.prod(leaf.shape, dtype=np.int64))
        if name in ("lora_a", "lora_b"):
            target = targets[module]
            size = size * sum(target.ranks) // (len(target.ranks) * target.r)
        total += size
    return total


def is_adapter(path: str) -> bool:
    """Whether the leaf at `path` is part of an adapter; rows of trained tokens count as one."""
    name = path.rpartition(".")[2]
    return name.startswith("lora_") or name == "trainable_tokens"


def expand(adapter: jax.Array, layers: Sequence[int], stack_size: int) -> jax.Array:
    """Spreads the adapters of some layers over a whole stack; the other layers get zeros.

    `[n, ...] -> [stack_size, ...]`. Zeros in both `lora_a` and `lora_b` add nothing, and the
    gradient of the spread reaches only the stored layers.
    """
    if len(layers) == stack_size:
        return adapter
    full = jnp.zeros((stack_size, *adapter.shape[1:]), adapter.dtype)
    return full.at[np.asarray(layers)].set(adapter)


@jax.custom_vjp
def delta(x: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scaling: jax.Array) -> jax.Array:
    """`scaling · (x A) B` in the dtype of `x` (Hu et al. 2021, section 4.1).

    Differentiable in all but `scaling`. The gradients are written out because autodiff's own ask
    for the transpose of `x` and of the cotangent, and on CPU these copies cost as much time as the
    large matmuls of the step.

    Args:
      x: `[..., K]`.
      lora_a: `[K, r]`.
      lora_b: `[r, N]`.
      scaling: float32 scalar.
    """
    return _delta_fwd(x, lora_a, lora_b, scaling)[0]


_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def _delta_fwd(
    x: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scaling: jax.Array
) -> tuple[jax.Array, _Saved]:
    xa = checkpoint_name(x @ lora_a.astype(x.dtype), "lora_xa")
    y = (xa * scaling.astype(x.dtype)) @ lora_b.astype(x.dtype)
    return y, (x, xa, lora_a, lora_b, scaling)


def _delta_bwd(saved: _Saved, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    x, xa, lora_a, lora_b, scaling = saved
    x_TK, xa_TR, g_TN = (array.reshape(-1, array.shape[-1]) for array in (x, xa, g))
    g_TR = _dot(g_TN, lora_b.astype(g.dtype), 1, 1) * scaling.astype(g.dtype)
    d_b = _dot(xa_TR, g_TN, 0, 0, jnp.float32) * scaling
    d_a = _dot(x_TK, g_TR, 0, 0, jnp.float32)
    d_x = _dot(g_TR, lora_a.astype(g.dtype), 1, 1).reshape(x.shape)
    return d_x, d_a.astype(lora_a.dtype), d_b.astype(lora_b.dtype), None


def _dot(x: jax.Array, y: jax.Array, of_x: int, of_y: int, out: Any = None) -> jax.Array:
    """Contracts dimension `of_x` of `x` with dimension `of_y` of `y`."""
    dims = (((of_x,), (of_y,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=out)


delta.defvjp(_delta_fwd, _delta_bwd)


def column_norms(weight: jax.Array) -> jax.Array:
    """Euclidean norm over the inputs of each output: `[..., K, N] -> [..., N]`."""
    return jnp.sqrt(jnp.sum(jnp.square(weight), axis=-2))


def dora_factor(
    weight: quant.Weight,
    contracting: int,
    adapter: tuple[jax.Array, jax.Array, jax.Array],
    magnitude: jax.Array,
    total: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """What DoRA multiplies `x (W + scaling · A B)` by: magnitude / norm, `[N]` float32.

    The norm is a constant to the gradient (Liu et al. 2024, section 4.3).

    Args:
      weight: the whole weight, quantised or not.
      contracting: its contracting dimension.
      adapter: `lora_a` [K, r], `lora_b` [r, N] and the scaling.
      magnitude: `[N]`.
      total: sum over the devices that have other inputs of these outputs.
    """
    lora_a, lora_b, scaling = adapter
    values = quant.dequantise(weight).astype(jnp.float32)
    values_KN = values if contracting == -2 else values.T
    adapted_KN = jax.lax.stop_gradient(values_KN + scaling * (lora_a @ lora_b))
    squares_N = total(jnp.sum(jnp.square(adapted_KN), axis=-2))
    return magnitude / jnp.sqrt(squares_N)


class Factors(NamedTuple):
    """The adapter that a weight was split into: `lora_a` [K, r] and `lora_b` [r, N], float32."""

    lora_a: jax.Array
    lora_b: jax.Array


def svd_factors(weight_KN: jax.Array, r: int, scaling: float) -> Factors:
    """The `r` largest singular values of a weight as an adapter (Meng et al. 2024, PiSSA)."""
    u, s, vh = jnp.linalg.svd(weight_KN.astype(jnp.float32), full_matrices=False)
    root = jnp.sqrt(s[:r] / scaling)
    return Factors(u[:, :r] * root[None, :], root[:, None] * vh[:r])


def qr_factors(weight_KN: jax.Array, r: int) -> Factors:
    """The first `r` columns of Q and rows of R of the `[N, K]` weight (Büyükakyüz 2024, OLoRA)."""
    q, upper = jnp.linalg.qr(weight_KN.astype(jnp.float32).T)
    return Factors(upper[:r].T, q[:, :r].T)


def residual(weight_KN: jax.Array, factors: Factors, scaling: float) -> jax.Array:
    """What is left of a weight beside the adapter that was taken out of it."""
    return weight_KN.astype(jnp.float32) - scaling * (factors.lora_a @ factors.lora_b)
