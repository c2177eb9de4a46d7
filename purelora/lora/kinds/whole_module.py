"""Weights and biases that are trained whole: PEFT's `modules_to_save` and `bias`."""

import dataclasses

import numpy as np

from purelora.core import errors, param_info
from purelora.core.paths import Path
from purelora.lora.kinds import base
from purelora.lora.targets import EMBEDDING, HEAD, Adaptation


class WholeModule(base.Kind):
    """A leaf of the base that is trained itself; it leaves the frozen tree."""

    name = "whole_module"
    title = "modules in full"
    flag = "modules_to_save"
    tensors = {
        # A module of modules_to_save.
        "weight": base.Tensor("weight", (1, 2)),
        # Of modules_to_save, or trained because of `bias`.
        "bias": base.Tensor("bias", (1,)),
        # The base's own weight, which PEFT stores beside the LoRA of an embedding or output head,
        # and which it puts into the base when it loads the adapter.
        "base_weight": base.Tensor("base_layer.weight"),
    }

    def declared(self, weight: param_info.ParamInfo) -> param_info.ParamInfo:
        """Declaration of the trained leaf: the base's, in float32."""
        return dataclasses.replace(weight, dtype="float32")

    def of_layers(
        self, leaf: Path, array: np.ndarray, *, is_stacked: bool, is_transposed: bool
    ) -> list[dict[str, np.ndarray]]:
        """The tensors of each layer, in PEFT's shapes."""
        layers = array if is_stacked else array[None]
        return [{leaf.name: layer.T if is_transposed else layer} for layer in layers]

    def conflicts(self, adaptation: Adaptation, *, is_tied: bool) -> list[errors.Problem]:
        doubled = [path for path in (EMBEDDING, HEAD) if path in adaptation.targets]
        if not (is_tied and doubled and f"{EMBEDDING}.weight" in adaptation.full):
            return []
        what = f"trains the tied table, which {doubled[0]} has an adapter on too"
        return [errors.Problem(f"lora.{self.flag}", EMBEDDING, what, "leave one of them out")]
