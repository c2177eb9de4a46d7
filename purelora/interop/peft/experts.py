"""Adapters on experts: from PEFT's files to the form that they have here, and back.

Here, each matrix of the experts has an adapter of its own, with all experts stacked. PEFT adapts
the parameters of transformers' module of experts, in which gate and up projection are one:

    here        ….mlp.experts.gate_proj      lora_A [E, r, D]    lora_B [E, F, r]
                ….mlp.experts.up_proj        lora_A [E, r, D]    lora_B [E, F, r]

    PEFT        ….mlp.experts.gate_up_proj   lora_A [E R, D]     lora_B [2 F, R E]

    PEFT, with transformers before version 5
                ….mlp.experts.5.gate_proj    lora_A [r, D]       lora_B [F, r]

In PEFT's flattened factors of a parameter, the rows of lora_A are indexed by (expert, rank) and the
columns of lora_B by (rank, expert). If several parameters of a module are adapted, PEFT nests their
wrappers: the tensors of the last one have the module's name, and those of each one before it have
one `.base_layer` more.

In gpt-oss the rows of `gate_up_proj` alternate, one of gate and one of up. Such a lora_B is put in
order when it is read, and put back when it is written.

Writing joins the adapters of gate and up projection to one whose rank R is the sum of theirs. Its
lora_A has the rows of both, and its lora_B is block diagonal, so the update is exactly the same.
Metadata in the file state the two ranks. Reading takes such an adapter apart again; any other
adapter of the joined parameter becomes two with the same lora_A.

What both directions need is here; `peft_experts_read` converts out of files and
`peft_experts_write` into them.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from purelora.core import errors
from purelora.interop.peft import adapter_config
from purelora.interop.peft import checks as peft_checks
from purelora.lora import kinds, targets

# By PEFT's name of a parameter: the rank of each matrix that is joined in it, in order.
Joined = Mapping[str, Mapping[str, int]]

LEVEL = ".base_layer"
# The matrices in each parameter of transformers' module of experts, in the order it declares them.
PARAMETERS: Mapping[str, tuple[str, ...]] = {**targets.JOINED, "down_proj": ("down_proj",)}


class Converted(NamedTuple):
    """An adapter after its experts were converted to the other form.

    Attributes:
      config: its config, with ranks and alphas under the new names.
      modules: its tensors by module and tensor ("lora_A", ...).
      joined: how matrices are joined in its parameters; empty in the form that they have here.
      problems: what is wrong with it.
    """

    config: adapter_config.AdapterConfig
    modules: peft_checks.Modules
    joined: Joined
    problems: tuple[errors.Problem, ...]


def is_of_experts(tensors: Mapping[str, np.ndarray]) -> bool:
    """Whether the tensors of a module, in the form that adapters have here, are of experts."""
    return "lora_A" in tensors and tensors["lora_A"].ndim == 3


def parameters(
    configs: Iterable[adapter_config.AdapterConfig], modules: peft_checks.Modules
) -> dict[str, str]:
    """For adapted modules that PEFT can only name as parameters: that name, by module.

    Args:
      configs: configs whose `target_parameters` tell which modules are named so.
      modules: tensors by module and tensor.
    """
    named = [config.target_parameters for config in configs]
    return {
        module: parameter
        for module, tensors in modules.items()
        if (parameter := targets.parameter_name(module)) and kinds.is_adapted(tensors)
        and (is_of_experts(tensors) or any(targets.matches(own, parameter) for own in named))
    }  # fmt: skip


def equal_alpha(config: adapter_config.AdapterConfig, alpha: float, r: int, new_r: int) -> float:
    """The alpha with which rank `new_r` has the scaling that `alpha` gives rank `r`."""
    if r == new_r:
        return alpha
    return alpha * (math.sqrt(new_r / r) if config.use_rslora else new_r / r)
