"""What a run is made of, before any weight is read: declarations, specs and mesh."""

import dataclasses
import functools

import jax.numpy as jnp
from jax.sharding import Mesh

from purelora.config import schema
from purelora.core import trees
from purelora.lora import targets
from purelora.models import causal_lm, moe, objective
from purelora.sharding import collectives, parallel, specs
from purelora.sharding.rules import Rules, parse_rules
from purelora.training import flops


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A resolved run without arrays.

    Attributes:
      config: the settings.
      model: family, sizes and adapters.
      mesh: the devices.
      base_infos: declarations of the frozen leaves; QArrays of infos where quantised. Empty when
        all weights are trained.
      trainable_infos: declarations of the trained leaves.
    """

    config: schema.Config
    model: causal_lm.CausalLM
    mesh: Mesh
    base_infos: trees.Tree
    trainable_infos: trees.Tree

    @functools.cached_property
    def rules(self) -> Rules:
        """From logical axes to mesh axes."""
        parsed = parse_rules(self.config.mesh.rules, self.config.mesh.overrides)
        weights = {path: module.weight.axes for path, module in self.model.modules.items()}
        tied = {targets.HEAD: targets.EMBEDDING} if self.model.is_tied else {}
        return parsed.settled(weights, tied)

    @functools.cached_property
    def base_specs(self) -> trees.Tree:
        """How the frozen leaves are split; see `specs.spec_tree`."""
        return specs.spec_tree(self.base_infos, self.mesh, self.rules, self.model.axis_counts)

    @functools.cached_property
    def trainable_specs(self) -> trees.Tree:
        """How the trained leaves are split."""
        sharded = self.config.mesh.shard_adapters or not self.config.lora.enabled
        rules = self.rules.of_adapters(sharded)
        return specs.spec_tree(self.trainable_infos, self.mesh, rules, self.model.axis_counts)

    @property
    def loaded(self) -> tuple[trees.Tree, trees.Tree]:
        """Declarations and specs of everything that is read: the base and what is trained whole."""
        if not self.config.lora.enabled:
            return self.trainable_infos, self.trainable_specs

        def with_full(base: trees.Tree, trained: trees.Tree) -> trees.Tree:
            flat, adaptation = trees.flatten(trained), self.model.adaptation
            return trees.combine(base, targets.split_trained(flat, adaptation).trained)

        infos = with_full(self.base_infos, self.trainable_infos)
        return infos, with_full(self.base_specs, self.trainable_specs)

    @functools.cached_property
    def shards(self) -> parallel.Shards:
        """How the leaves lie on the devices, as the model sees it."""
        together = trees.combine(self.base_specs, self.trainable_specs)
        keep = self.config.mesh.keep_gathered
        return collectives.shards(together, self.model.flat_infos, keep_gathered=keep)

    @property
    def execution(self) -> objective.Execution:
        """How the model is computed."""
        c = self.config
        return objective.Execution(
            dtype=jnp.dtype(c.dtype),
            scan_layers=c.scan_layers,
            remat=c.remat == "full",
            chunk_tokens=c.loss_chunk_tokens,
        )

    @property
    def router_weights(self) -> moe.RouterLossWeights:
        """The coefficients of the router's losses, and how they count tokens."""
        return moe.RouterLossWeights(
            balance=self.config.router_aux_loss_coef,
            z=self.config.router_z_loss_coef,
            is_pooled=self.config.router_aux == "transformers",
        )

    @property
    def device_kinds(self) -> list[str]:
        """Kind of each device of the mesh."""
        return [device.device_kind for device in self.mesh.devices.flat]

    @property
    def flops_per_token(self) -> float:
        """Operations per token of a training step."""
        weights, experts = self.model.flat_infos, self.model.config.experts
        trained = {p: i for p, i in trees.flatten(self.trainable_infos).items() if i.is_matrix}
        return flops.per_token(
            weights,
            {path: leaf for path, leaf in trained.items() if path not in weights},
            trained_weights={path for path in trained if path in weights},
            experts_share=1.0 if experts is None else experts.per_token / experts.count,
            attention_widths=[s.num_attention_heads * s.head_dim for s in self.model.layer_configs],
            windows=[kind.window for kind in self.model.config.layer_kinds],
            length=self.config.max_length,
        )
