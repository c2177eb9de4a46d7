"""DoRA (Liu et al. 2024): LoRA gives a weight its direction, and a magnitude gives it its length.

Beside LoRA's two factors a module has `lora_magnitude` [N], the norm of each output's weights.
"""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import errors, param_info
from purelora.lora.kinds import base, lora
from purelora.lora.targets import HEAD, Adaptation, Target
from purelora.ops import quant


class DoRA(lora.LoRA):
    """LoRA, and a learned norm of each output's weights."""

    name = "dora"
    title = "LoRA with DoRA"
    flag = "use_dora"
    suffix = " with DoRA"
    places = frozenset(("linear", "head"))
    begins_at_weight = True
    order: ClassVar[tuple[str, ...]] = ("lora_a", "lora_b", "scaling", "lora_magnitude")
    tensors = {"lora_magnitude_vector": base.Tensor("lora_magnitude_vector", (1,), ".weight")}

    def declare(
        self, weight: param_info.ParamInfo, target: Target, init: str
    ) -> dict[str, param_info.ParamInfo]:
        """LoRA's leaves, and `lora_magnitude` [N] in float32."""
        _, n = weight.matrix_dims
        shape, axes = (weight.shape[n],), (weight.axes[n],)
        magnitude = param_info.ParamInfo(shape, "float32", axes, init="ones")
        return super().declare(weight, target, init) | {"lora_magnitude": magnitude}

    def from_weight(self, weight_KN: jax.Array) -> dict[str, jax.Array]:
        """The norms of the weights, since `lora_b` begins at zero."""
        return {"lora_magnitude": column_norms(weight_KN)}

    def output(self, bound: base.Bound, y: jax.Array, call: base.Call) -> jax.Array:
        """The output with the norm of each output's weights set to its magnitude.

        As in PEFT, dropout thins out everything but the plain product.
        """
        delta = lora.added(bound, y, call)
        module, scaling = call.module, bound["scaling"]
        assert module.contracting is not None
        weight = jax.lax.stop_gradient(module.gather(module.weight))
        adapter = bound["lora_a"], bound["lora_b"], scaling
        factor = dora_factor(
            weight,
            module.contracting,
            adapter,
            bound["lora_magnitude"],
            module.parallel.reduce_from,
        )
        # Layers of the stack without an adapter have a scaling of 0 and stay as they are.
        factor = jnp.where(scaling > 0, factor, 1.0).astype(y.dtype)
        factor = factor.reshape((1,) * (y.ndim - 1) + (-1,))
        thinned = y if call.adapter_x is call.x else call.base_product(call.adapter_x)
        return y - thinned + factor * (thinned + delta)

    def peft_leaves(self, target: Target) -> dict[str, base.Leaf]:
        return super().peft_leaves(target) | {"lora_magnitude": base.Leaf("lora_magnitude_vector")}

    def updated(self, weight: np.ndarray, tensors: base.Arrays, scaling: np.float32) -> np.ndarray:
        """Equation 5 of the paper: each output's weights get the norm that was learned."""
        result = super().updated(weight, tensors, scaling)
        norms = np.linalg.norm(result, axis=1)
        magnitude = tensors["lora_magnitude_vector"].astype(np.float32)
        return result * (magnitude / norms)[:, None]

    def tensor_problems(self, tensors: base.Arrays) -> list[tuple[object, str]]:
        """A magnitude for other outputs than the factors have; these are LoRA's own to check."""
        magnitude = tensors.get("lora_magnitude_vector")
        problems: list[tuple[object, str]] = []
        for a, b in self.sets:
            if magnitude is None or not (a in tensors and b in tensors):
                continue
            if tensors[a].ndim == tensors[b].ndim >= 2 and magnitude.shape != tensors[b].shape[:1]:
                what = f"lora_magnitude_vector does not fit the rows of {b}"
                problems.append(((magnitude.shape, tensors[b].shape), what))
        return problems

    def conflicts(self, adaptation: Adaptation, *, is_tied: bool) -> list[errors.Problem]:
        head, problems = (
            adaptation.targets.get(HEAD),
            super().conflicts(adaptation, is_tied=is_tied),
        )
        if adaptation.token_ids and is_tied and head is not None and head.kind == self.name:
            key, remedy = "lora.trainable_token_indices", "leave one of the two out"
            what = "changes the norms that DoRA's magnitudes on the tied head are of"
            problem = errors.Problem(
                key, adaptation.token_ids, what, f"{remedy}, or exclude {HEAD}"
            )
            return [problem, *problems]
        return problems


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
