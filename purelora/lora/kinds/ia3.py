"""(IA)³ (Liu et al. 2022): a learned factor for each output of a module, or for each input.

Of a module `down_proj` the inputs are scaled, which are the activations inside the feed-forward
part; of all others the outputs, with the bias. PEFT names the former in `feedforward_modules`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import param_info
from purelora.lora.kinds import base
from purelora.lora.targets import Target, matches

INPUTS = "inputs"  # The variant that scales inputs.
_FEEDFORWARD = ("down_proj",)
_KEY, _LEAVES = "feedforward_modules", {"": "ia3_outputs", INPUTS: "ia3_inputs"}


class IA3(base.Kind):
    """A vector beside a weight, which begins with ones."""

    name = "ia3"
    title = "(IA)³"
    peft_type = "IA3"
    order = ("ia3_inputs", "ia3_outputs", "scaling")
    tensors = {"ia3_l": base.Tensor("ia3_l")}
    sets = (("ia3_l",),)
    without = {
        "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "lora_dropout": 0.0,
        "bias": "none", "trainable_token_indices": (), "target_parameters": (),
        "init_lora_weights": "default",
    }  # fmt: skip
    peft_keys = {
        "target_modules": "target_modules", "exclude_modules": "exclude_modules",
        "modules_to_save": "modules_to_save",
        "base_model_name_or_path": "base_model_name_or_path",
    }  # fmt: skip
    peft_patterns = (_KEY,)
    peft_history = {"fan_in_fan_out": False, "init_ia3_weights": True}
    is_ranked = False

    def variant(self, name: str, patterns: Mapping[str, Any]) -> str:
        chosen = patterns.get(_KEY, _FEEDFORWARD)
        if isinstance(chosen, str):
            return INPUTS if matches(chosen, name) else ""
        # PEFT compares bare endings.
        return INPUTS if name.endswith(tuple(chosen)) else ""

    def patterns_of(
        self, variants: Mapping[str, str], entries: Sequence[str]
    ) -> dict[str, tuple[str, ...]]:
        scaled = [name for name, variant in variants.items() if variant == INPUTS]
        # PEFT asks for entries of target_modules.
        named = [entry for entry in entries if any(matches([entry], name) for name in scaled)]
        return {_KEY: tuple(named)}

    def declare(
        self, weight: param_info.ParamInfo, target: Target, init: str
    ) -> dict[str, param_info.ParamInfo]:
        """`ia3_inputs` [K] or `ia3_outputs` [N] in float32."""
        del init
        dim = weight.matrix_dims[0 if target.variant == INPUTS else 1]
        shape, axes = (weight.shape[dim],), (weight.axes[dim],)
        info = param_info.ParamInfo(shape, "float32", axes, init="ones")
        return {_LEAVES[target.variant]: info}

    def input(self, bound: base.Bound, x: jax.Array) -> jax.Array:
        return _scaled(bound, "ia3_inputs", x)

    def output(self, bound: base.Bound, y: jax.Array, call: base.Call) -> jax.Array:
        del call
        return _scaled(bound, "ia3_outputs", y)

    def bias(self, bound: base.Bound, bias: jax.Array, module: base.BoundModule) -> jax.Array:
        # Devices that have other inputs each add their share, so that gradients are shares too.
        share = module.parallel.axis_size if module.parallel.style == "row" else 1
        return module.parallel.reduce_from(_scaled(bound, "ia3_outputs", bias / share))

    def peft_leaves(self, target: Target) -> dict[str, base.Leaf]:
        layout: base.Layout = "row" if target.variant == INPUTS else "column"
        return {_LEAVES[target.variant]: base.Leaf("ia3_l", layout)}

    def updated(self, weight: np.ndarray, tensors: base.Arrays, scaling: np.float32) -> np.ndarray:
        del scaling
        return weight * tensors["ia3_l"].astype(np.float32)

    def updated_bias(self, bias: np.ndarray, tensors: base.Arrays) -> np.ndarray:
        factors = tensors["ia3_l"].astype(np.float32)
        return bias * factors[:, 0] if factors.shape[0] == bias.shape[0] else bias


def _scaled(bound: base.Bound, leaf: str, x: jax.Array) -> jax.Array:
    if leaf not in bound.names:
        return x
    # Layers of the stack without an adapter have a scaling of 0 and stay as they are.
    factors = jnp.where(bound["scaling"] > 0, bound[leaf], 1.0).astype(x.dtype)
    return x * factors.reshape((1,) * (x.ndim - 1) + (-1,))
