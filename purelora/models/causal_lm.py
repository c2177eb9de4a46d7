"""A family's pure functions put together: declarations, activations and logits of one model."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from purelora.config import schema
from purelora.core import param_info, trees
from purelora.core.batch import Inputs
from purelora.lora import adapters as lora
from purelora.lora import resolve, targets
from purelora.models import (
    decoder,
    hf_config,
    hf_layout,
    hf_multimodal,
    layers,
    moe,
    params,
    stacks,
)
from purelora.models.families import registry
from purelora.sharding import parallel


@dataclasses.dataclass(frozen=True, eq=False)
class CausalLM:
    """One model: its family, sizes, declarations and adapters. Holds no arrays.

    Attributes:
      family: module with the family's functions.
      config: its sizes and settings.
      infos: declarations of the unquantised parameters.
      adaptation: what is trained beside the base; nothing without LoRA.
    """

    family: decoder.Family
    config: hf_config.Config
    infos: trees.Tree
    adaptation: targets.Adaptation

    @functools.cached_property
    def flat_infos(self) -> dict[str, param_info.ParamInfo]:
        return trees.flatten(self.infos)

    @functools.cached_property
    def modules(self) -> dict[str, targets.AdaptableModule]:
        """The matrices that adapters can go to."""
        return decoder.modules(self.config, self.infos)

    @functools.cached_property
    def hf_names(self) -> dict[str, tuple[str, ...]]:
        """Hugging Face name of each layer of every leaf."""
        return {path: decoder.hf_names(self.config, path) for path in self.flat_infos}

    @functools.cached_property
    def layout(self) -> hf_layout.Layout:
        """The layout in which this family's models are published, for when no file is at hand."""
        return self.layouts[self._convention]

    @property
    def _convention(self) -> str:
        """How this family's published files hold experts, a key of `storage.CONVENTIONS`."""
        return hf_layout.NUMBERED if self.config.experts is None else self.config.experts.files

    @property
    def is_interleaved(self) -> bool:
        """Whether gate and up projection of an expert alternate in the tensor that holds both."""
        return hf_layout.CONVENTIONS[self._convention].is_interleaved

    def layout_of(self, held: Collection[str]) -> hf_layout.Layout:
        """The layout of a file that holds the tensors `held`: the one with most names in common."""
        return max(
            self.layouts.values(), key=lambda layout: sum(name in held for name in layout.shapes)
        )

    @functools.cached_property
    def layouts(self) -> Mapping[str, hf_layout.Layout]:
        """The layouts that files of the model may have, by convention and spelling of the names."""
        return {
            convention + spelling: spelled
            for convention in hf_layout.beside(self._convention)
            for spelling, spelled in hf_multimodal.spellings(
                self.config, hf_layout.layout(self.flat_infos, self.hf_names, convention)
            ).items()
        }

    def left_out(self, held: Iterable[str]) -> list[str]:
        """Those of the tensors `held` that a file may have although the model does not use them."""
        return [name for name in held if hf_multimodal.is_left_out(self.config, name)]

    @property
    def layer_configs(self) -> list[hf_config.Config]:
        """For each layer of the model, in order, the config of its stack."""
        groups = stacks.of(self.config)
        return [groups[number].cfg for number in stacks.numbers(groups)]

    @property
    def stack_paths(self) -> tuple[str, ...]:
        """Tree path of each stack of layers."""
        return tuple(stack.path for stack in stacks.of(self.config))

    @property
    def axis_counts(self) -> Mapping[str, int]:
        """How many heads each logical axis of heads holds; see `decoder.axis_counts`."""
        return decoder.axis_counts(self.config)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding table."""
        return f"{targets.HEAD}.weight" not in self.flat_infos

    def adapted(self, settings: schema.LoraConfig) -> "CausalLM":
        """This model with what `settings` train. Raises ConfigError, see `lora.resolve`."""
        return self.with_adaptation(resolve.resolve(settings, self.modules, self.hf_names))

    def with_adaptation(self, adaptation: targets.Adaptation) -> "CausalLM":
        return dataclasses.replace(self, adaptation=adaptation)

    def frozen_infos(self) -> trees.Tree:
        """Declarations of what is not trained whole."""
        return trees.unflatten(targets.split_trained(self.flat_infos, self.adaptation).frozen)

    def adapter_infos(self, init: str = "default") -> trees.Tree:
        """Declarations of everything that is trained beside the base, in float32.

        `init` is `lora.init_lora_weights`.
        """
        return lora.trained_infos(self.flat_infos, self.modules, self.adaptation, init=init)

    def bind(
        self,
        base: trees.Tree,
        trainable: trees.Tree,
        shards: parallel.Shards = parallel.NO_SHARDS,
    ) -> trees.Tree:
        """Base and trained leaves as the modules that the family's functions take."""
        return params.bind(
            base,
            trainable,
            infos=self.flat_infos,
            adaptation=self.adaptation,
            shards=shards,
        )

    def hidden(
        self, bound: trees.Tree, inputs: Inputs, **how: Any
    ) -> tuple[jax.Array, moe.RouterSums | None]:
        """The activations before the head, `[B, T, D]`, and router statistics; `decoder.hidden`."""
        return decoder.hidden(self.family, self.config, bound, inputs, **how)

    def head_logits(self, x: jax.Array, bound: trees.Tree, dtype: Any) -> jax.Array:
        """Logits `[..., V]` in `dtype` from activations `x`, `[..., D]`, that `hidden` returned."""
        logits = layers.adapted(x, x, decoder.head(bound), dtype)
        return layers.softcapped(logits, self.config.final_softcap)

    def logits(
        self,
        trainable: trees.Tree,
        base: trees.Tree,
        inputs: Inputs,
        *,
        dtype: Any = jnp.float32,
        scan_layers: bool = True,
    ) -> jax.Array:
        """Logits `[B, T, V]` of whole sequences, in `dtype`."""
        bound = self.bind(base, trainable)
        x_BTD, _ = self.hidden(bound, inputs, dtype=dtype, scan_layers=scan_layers, remat=False)
        return self.head_logits(x_BTD, bound, dtype)


def from_hf(config: Mapping[str, Any], where: str, *, dtype: str) -> CausalLM:
    """The model that a Hugging Face config.json describes, without adapters.

    Args:
      config: the file's contents.
      where: the file, for messages.
      dtype: dtype that unquantised weights are stored in.

    Raises:
      ModelError: an architecture that no family knows, or a missing or wrong field.
    """
    family = registry.family_of(config, where)
    family_config = family.from_hf(config, where)
    infos = decoder.param_infos(family, family_config, dtype)
    return CausalLM(family, family_config, infos, targets.Adaptation())
