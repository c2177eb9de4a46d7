"""LoHa (Hyeon-Woo et al. 2022, FedPara): the Hadamard product of two low-rank updates.

`y = x W + scaling · x ((A1 B1) ∘ (A2 B2))`, whose rank may be r². In PEFT's files, where weights
are `[out, in]`, `hada_w1_a` [out, r] is B1 and `hada_w1_b` [r, in] is A1.
"""

from typing import Any

import jax
import numpy as np

from purelora.core import param_info
from purelora.lora.kinds import base
from purelora.lora.targets import Target

_NAMES = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
_PATTERNS = ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern",
             "layers_to_transform", "layers_pattern", "modules_to_save",
             "base_model_name_or_path")  # fmt: skip


class LoHa(base.Kind):
    """Two pairs of thin matrices beside a weight; `hada_w2_b` begins with zeros."""

    name = "loha"
    title = "LoHa"
    peft_type = "LOHA"
    order = (*_NAMES, "scaling")
    tensors = {name: base.Tensor(name) for name in _NAMES}
    sets = (_NAMES,)
    without = {
        "use_rslora": False, "lora_dropout": 0.0, "bias": "none", "trainable_token_indices": (),
        "target_parameters": (), "init_lora_weights": "default",
    }  # fmt: skip
    peft_keys = {"r": "r", "alpha": "lora_alpha", **{key: key for key in _PATTERNS}}
    # What is dropped while training, and layouts of convolutions.
    peft_history = {
        "rank_dropout": 0.0, "module_dropout": 0.0, "use_effective_conv2d": False,
        "init_weights": True,
    }  # fmt: skip

    def declare(
        self, weight: param_info.ParamInfo, target: Target, init: str
    ) -> dict[str, param_info.ParamInfo]:
        """Of each pair `hada_w?_b` [K, r] and `hada_w?_a` [r, N], in float32."""
        del init
        k, n = weight.matrix_dims

        def factor(name: str, **how: Any) -> param_info.ParamInfo:
            dims = (k, None) if name.endswith("b") else (None, n)
            shape = tuple(target.r if dim is None else weight.shape[dim] for dim in dims)
            axes = tuple("rank" if dim is None else weight.axes[dim] for dim in dims)
            return param_info.ParamInfo(shape, "float32", axes, contracting=-2, **how)

        # As in PEFT, uniform on ±1 / sqrt(fan_in) of its own layout, but for one that is zero.
        stds = {"hada_w1_a": target.r, "hada_w1_b": weight.shape[k], "hada_w2_a": target.r}
        infos = {
            name: factor(name, init="normal", std=(3 * fan_in) ** -0.5)
            for name, fan_in in stds.items()
        }
        return infos | {"hada_w2_b": factor("hada_w2_b", init="zeros")}

    def output(self, bound: base.Bound, y: jax.Array, call: base.Call) -> jax.Array:
        update_KN = (bound["hada_w1_b"] @ bound["hada_w1_a"]) * (
            bound["hada_w2_b"] @ bound["hada_w2_a"]
        )
        update_KN = (bound["scaling"] * update_KN).astype(y.dtype)
        return y + call.x.astype(y.dtype) @ update_KN

    def peft_leaves(self, target: Target) -> dict[str, base.Leaf]:
        del target
        axes = {name: -1 if name.endswith("b") else -2 for name in _NAMES}
        return {name: base.Leaf(name, "transposed", axis) for name, axis in axes.items()}

    def rank_of(self, tensor: np.ndarray) -> int | None:
        return int(tensor.shape[-1])

    def updated(self, weight: np.ndarray, tensors: base.Arrays, scaling: np.float32) -> np.ndarray:
        w1_a, w1_b, w2_a, w2_b = (tensors[name].astype(np.float32) for name in _NAMES)
        return weight + scaling * ((w1_a @ w1_b) * (w2_a @ w2_b))

    def tensor_problems(self, tensors: base.Arrays) -> list[tuple[object, str]]:
        if not all(name in tensors and tensors[name].ndim == 2 for name in _NAMES):
            return []
        pairs = [(tensors[a].shape, tensors[b].shape) for a, b in (_NAMES[:2], _NAMES[2:])]
        if len({shape for a, b in pairs for shape in (a[1], b[0])}) > 1:
            return [(pairs, "hada_w?_a and hada_w?_b differ in r")]
        return [(pairs, "the two products differ in shape")] if pairs[0] != pairs[1] else []
