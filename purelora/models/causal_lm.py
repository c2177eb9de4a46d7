"""A family's pure functions put together: declarations, loss and logits of one configured model."""

import dataclasses
import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from purelora import errors, info, lora, loss, params, quant
from purelora import tree as trees
from purelora.models import layers, llama

FAMILIES: tuple[ModuleType, ...] = (llama,)


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a forward pass is run; none of it changes the result beyond rounding.

    Attributes:
      dtype: dtype of the activations.
      scan_layers: one compiled body for all layers of a stack.
      remat: recompute each block in the backward pass.
      chunk_tokens: how many tokens' logits exist at once.
    """

    dtype: Any
    scan_layers: bool
    remat: bool
    chunk_tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class CausalLM:
    """One model: its family, sizes, declarations and adapters. Holds no arrays.

    Attributes:
      family: module with the family's functions.
      config: the family's own config.
      infos: declarations of the unquantised parameters.
      targets: the adapters by module path; empty without LoRA.
    """

    family: ModuleType
    config: Any
    infos: trees.Tree
    targets: Mapping[str, lora.Target]

    @functools.cached_property
    def flat_infos(self) -> dict[str, info.ParamInfo]:
        return trees.flatten(self.infos)

    @functools.cached_property
    def modules(self) -> dict[str, lora.LinearModule]:
        """The matrices that adapters can go to."""
        return self.family.linear_modules(self.config, self.infos)

    def with_targets(self, targets: Mapping[str, lora.Target]) -> "CausalLM":
        return dataclasses.replace(self, targets=targets)

    def adapter_infos(self) -> trees.Tree:
        return lora.adapter_infos(self.modules, self.targets)

    def bind(
        self,
        base: trees.Tree,
        trainable: trees.Tree,
        gathers: Mapping[str, quant.Gather] | None = None,
    ) -> trees.Tree:
        """Base and trained leaves as the modules that the family's functions take."""
        return params.bind(
            base, trainable, infos=self.flat_infos, targets=self.targets, gathers=gathers or {}
        )

    def loss_sum(
        self,
        trainable: trees.Tree,
        base: trees.Tree,
        batch: Any,
        *,
        execution: Execution,
        gathers: Mapping[str, quant.Gather],
        dropout: layers.Dropout | None,
    ) -> jax.Array:
        """Weighted sum of the token losses of one micro-batch of `[B, T]` arrays."""
        bound = self.bind(base, trainable, gathers)
        inputs = layers.Inputs(batch.tokens, batch.positions, batch.segment_ids)
        x_BTD = self.family.hidden(
            bound,
            inputs,
            self.config,
            dtype=execution.dtype,
            scan_layers=execution.scan_layers,
            remat=execution.remat,
            dropout=dropout,
        )
        head = self.family.head(bound)
        return loss.xent_sum(
            x_BTD,
            head,
            batch.targets,
            batch.weights,
            chunk_tokens=execution.chunk_tokens,
            dropout=dropout,
        )

    def logits(
        self,
        trainable: trees.Tree,
        base: trees.Tree,
        inputs: layers.Inputs,
        *,
        dtype: Any = jnp.float32,
        scan_layers: bool = True,
    ) -> jax.Array:
        """Logits `[B, T, V]` of whole sequences, in `dtype`."""
        bound = self.bind(base, trainable)
        x_BTD = self.family.hidden(
            bound, inputs, self.config, dtype=dtype, scan_layers=scan_layers, remat=False
        )
        return layers.linear(x_BTD, self.family.head(bound))


def from_hf(config: Mapping[str, Any], where: str, *, dtype: str) -> CausalLM:
    """The model that a Hugging Face config.json describes, without adapters.

    Args:
      config: the file's contents.
      where: the file, for messages.
      dtype: dtype that unquantised weights are stored in.

    Raises:
      ModelError: an architecture that no family knows, or a missing or wrong field.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    for family in FAMILIES:
        if name in family.ARCHITECTURES:
            family_config = family.from_hf(config, where)
            infos = family.param_infos(family_config, dtype)
            return CausalLM(family, family_config, infos, {})
    known = ", ".join(a for family in FAMILIES for a in family.ARCHITECTURES)
    raise errors.ModelError(
        f"{where}: architectures", names, "is not a model that purelora knows", f"known: {known}"
    )


def make_forward(
    model: CausalLM,
    execution: Execution,
    gathers: Mapping[str, quant.Gather],
    dropout_rate: float,
) -> Any:
    """The `step.Forward` of a model: the weighted loss sum of one micro-batch."""

    def forward(
        trainable: trees.Tree,
        base: trees.Tree,
        batch: Any,
        *,
        key: jax.Array | None,
        rows_B: jax.Array,
    ) -> jax.Array:
        dropout = None
        if key is not None and dropout_rate > 0:
            dropout = layers.Dropout(key, rows_B, dropout_rate)
        return model.loss_sum(
            trainable, base, batch, execution=execution, gathers=gathers, dropout=dropout
        )

    return forward
