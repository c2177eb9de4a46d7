"""LoRA (Hu et al. 2021): `y = x W + scaling · (x A) B`.

base infos                                   adapter infos
layers.self_attn.q_proj.weight [L, D, N]  ─▶ layers.self_attn.q_proj.lora_a [n, D, r]
                                             layers.self_attn.q_proj.lora_b [n, r, N]
embed_tokens.weight [V, D]                ─▶ embed_tokens.lora_a [V, r], .lora_b [r, D]
layers.mlp.experts.up_proj.weight         ─▶ layers.mlp.experts.up_proj.lora_a [n, E, D, r]
                           [L, E, D, F]      layers.mlp.experts.up_proj.lora_b [n, E, r, F]
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from purelora.core import param_info
from purelora.lora.kinds import base
from purelora.lora.targets import Target
from purelora.ops import grouped_matmul

PAIR, EMBEDDING_PAIR = ("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")


class LoRA(base.Kind):
    """The product of two thin matrices beside a weight."""

    name = "lora"
    title = "LoRA"
    places = frozenset(("linear", "head", "embedding", "experts", "router"))
    order: ClassVar[tuple[str, ...]] = ("lora_a", "lora_b", "scaling")
    # lora_A [r, in], lora_B [out, r], lora_embedding_A [r, V], lora_embedding_B [D, r]; those of
    # experts have three dimensions.
    tensors = {
        "lora_A": base.Tensor("lora_A.weight", (2, 3)),
        "lora_B": base.Tensor("lora_B.weight", (2, 3)),
        "lora_embedding_A": base.Tensor("lora_embedding_A"),
        "lora_embedding_B": base.Tensor("lora_embedding_B"),
    }
    sets = (PAIR, EMBEDDING_PAIR)
    takes_dropout = True
    suffix = ""

    def declare(
        self, weight: param_info.ParamInfo, target: Target, init: str
    ) -> dict[str, param_info.ParamInfo]:
        """`lora_a` [K, r] and `lora_b` [r, N] in float32; of experts [E, K, r] and [E, r, N].

        K is the weight's contracting dimension and N the other one (for an embedding, rows and
        columns of the table); each takes the logical axis of the dimension it comes from, so
        adapter specs follow the base kernel's spec axis by axis.
        """
        k, n = weight.matrix_dims[::-1] if target.is_embedding else weight.matrix_dims
        lead, axes = weight.shape[:-2], weight.axes[:-2]

        def factor(shape: tuple[int, ...], ends: tuple[str | None, ...], **how: Any) -> Any:
            whole, names = (*lead, *shape), (*axes, *ends)
            return param_info.ParamInfo(whole, "float32", names, contracting=-2, **how)

        # As in PEFT it is the other factor of an embedding's adapter that begins at zero.
        init_b = {"init": "normal", "std": 1.0} if target.is_embedding else {"init": "zeros"}
        return {
            "lora_a": factor(
                (weight.shape[k], target.r), (weight.axes[k], "rank"), **_init_of_a(target, init)
            ),
            "lora_b": factor((target.r, weight.shape[n]), ("rank", weight.axes[n]), **init_b),
        }

    def rescaled(
        self, leaves: dict[str, Any], infos: Mapping[str, param_info.ParamInfo], target: Target
    ) -> dict[str, Any]:
        """A normal `lora_a` with the deviation 1 / r of each layer's own rank."""
        if infos["lora_a"].std is None:
            return leaves
        a = leaves["lora_a"]
        factors = (np.float32(target.r) / np.asarray(target.ranks, np.float32)).astype(np.float32)
        return leaves | {"lora_a": a * factors.reshape(-1, *(1,) * (a.ndim - 1))}

    def output(self, bound: base.Bound, y: jax.Array, call: base.Call) -> jax.Array:
        return y + added(bound, y, call)

    def grouped_output(
        self,
        bound: base.Bound,
        y_RN: jax.Array,
        x_RK: jax.Array,
        groups: grouped_matmul.RowGroups,
    ) -> jax.Array:
        factors = bound["lora_a"], bound["lora_b"], bound["scaling"]
        return y_RN + grouped_matmul.delta(x_RK, *factors, groups)

    def embedded(self, bound: base.Bound, x_BTD: jax.Array, lookup: base.Lookup) -> jax.Array:
        picked = (bound["lora_a"][lookup.rows_BT] * bound["scaling"]).astype(lookup.dtype)
        return x_BTD + picked @ bound["lora_b"].astype(lookup.dtype)

    def peft_leaves(self, target: Target) -> dict[str, base.Leaf]:
        a, b = EMBEDDING_PAIR if target.is_embedding else PAIR
        return {
            "lora_a": base.Leaf(a, "transposed", rank_axis=-1),
            "lora_b": base.Leaf(b, "transposed", rank_axis=-2),
        }

    def rank_of(self, tensor: np.ndarray) -> int | None:
        return int(tensor.shape[-2])

    def updated(self, weight: np.ndarray, tensors: base.Arrays, scaling: np.float32) -> np.ndarray:
        result = weight
        for a, b in self.sets:
            if a in tensors:
                product = tensors[b].astype(np.float32) @ tensors[a].astype(np.float32)
                result = result + scaling * (product.T if a in EMBEDDING_PAIR else product)
        return result

    def tensor_problems(self, tensors: base.Arrays) -> list[tuple[object, str]]:
        problems: list[tuple[object, str]] = []
        if all(name in tensors for names in self.sets for name in names):
            problems.append((None, "has adapters of two kinds"))
        for a, b in self.sets:
            if not (a in tensors and b in tensors and tensors[a].ndim == tensors[b].ndim >= 2):
                continue
            shapes = tensors[a].shape, tensors[b].shape
            if shapes[0][-2] != shapes[1][-1]:
                problems.append((shapes, f"{a} and {b} differ in r"))
            if shapes[0][:-2] != shapes[1][:-2]:
                problems.append((shapes, f"{a} and {b} differ in experts"))
        return problems


def _init_of_a(target: Target, init: str) -> dict[str, Any]:
    if target.is_embedding:
        return {"init": "zeros"}
    if init == "gaussian":
        return {"init": "normal", "std": 1 / target.r}
    return {"init": "he_uniform"}


def added(bound: base.Bound, y: jax.Array, call: base.Call) -> jax.Array:
    """`scaling · (x A) B` in the dtype of the output `y`."""
    factors = bound["lora_a"], bound["lora_b"], bound["scaling"]
    return delta(call.adapter_x, *factors).astype(y.dtype)


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
    chex.assert_rank([lora_a, lora_b, scaling], [2, 2, 0])
    chex.assert_equal(lora_a.shape, (x.shape[-1], lora_b.shape[0]))
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
