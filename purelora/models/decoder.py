"""A decoder around the layers of a family: embedding, the layers, last norm and head.

Layers whose parameters have the same shapes are one stack, even if they are of different kinds: the
window of a layer and its rotary frequencies are chosen by its number while the stack is run. Layers
with parameters of other shapes are in a stack of their own, see `stacks`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from purelora.core import layer_axis, trees
from purelora.core.batch import Inputs
from purelora.core.param_info import LAYERS, ParamInfo
from purelora.lora import targets
from purelora.models import (
    blocks,
    kv_sharing,
    layers,
    moe,
    params,
    per_layer_embeddings,
    scan,
    stacks,
)
from purelora.models.hf_config import Config, Kind
from purelora.ops import attention


class Family(Protocol):
    """What a family's module has."""

    @property
    def ARCHITECTURES(self) -> tuple[str, ...]:
        """Names in a config.json that are of this family."""

    def from_hf(self, config: Mapping[str, Any], where: str) -> Config:
        """Reads a config.json; `where` names it in messages.

        Raises:
          ModelError: missing or wrong fields; all of them in one error.
        """

    def layer_infos(self, cfg: Config, dtype: str) -> trees.Tree:
        """Declarations of the parameters of ONE layer of a stack; `cfg` is its `Stack.cfg`."""

    def block(
        self,
        x_BTD: jax.Array,
        layer: trees.Tree,
        context: blocks.Context,
        cfg: Config,
        dropout: layers.Dropout | None,
    ) -> blocks.Output:
        """Computes one layer of a stack; `cfg` is its `Stack.cfg`."""


def param_infos(family: Family, cfg: Config, dtype: str) -> trees.Tree:
    """Declarations of all parameters: kernels are [in, out], tables [V, D], stacks lead with L."""
    axes, shape = ("vocab", "embed"), (cfg.vocab_size, cfg.hidden_size)
    table = {"weight": ParamInfo(shape, dtype, axes, contracting=-1)}
    infos = [
        {targets.EMBEDDING: table},
        per_layer_embeddings.infos(cfg, dtype),
        *(
            trees.unflatten({stack.path: stacked_infos(family, stack, dtype)})
            for stack in stacks.of(cfg)
        ),
        {"norm": blocks.norm(cfg, cfg.hidden_size, dtype)},
    ]
    return trees.combine(*infos, {} if cfg.tie_word_embeddings else {targets.HEAD: table})


def stacked_infos(family: Family, stack: stacks.Stack, dtype: str) -> trees.Tree:
    """Declarations of a stack: those of one layer, so often along a first axis `layers`."""
    one = family.layer_infos(stack.cfg, dtype)
    return layer_axis.stack([one] * len(stack.layers), name=LAYERS)


def axis_counts(cfg: Config) -> dict[str, int]:
    """How many heads each logical axis of heads holds, as a mesh axis must not cut a head.

    Where stacks differ it is the greatest common divisor: what divides it divides every stack's.
    """
    kv_heads = [stack.cfg.num_key_value_heads for stack in stacks.of(cfg)]
    return {"heads": cfg.num_attention_heads, "kv_heads": math.gcd(*kv_heads)}


# Parameters and buffers that are no module's weight: in files their names have no `.weight`.
_BARE = ("layer_scalar", "router.scale", "router.per_expert_scale", "self_attn.sinks")


def hf_names(cfg: Config, path: str) -> tuple[str, ...]:
    """Hugging Face name of each layer of the leaf or module at `path`; one name if not stacked."""
    if path.endswith(tuple(f"{name}.weight" for name in _BARE)):
        path = path.removesuffix(".weight")
    stack = stacks.holding(cfg, path)
    if stack is not None:
        rest = path.removeprefix(f"{stack.path}.")
        return tuple(f"{cfg.prefix}.layers.{i}.{rest}" for i in stack.layers)
    return (path,) if path.startswith(targets.HEAD) else (f"{cfg.prefix}.{path}",)


def modules(cfg: Config, infos: trees.Tree) -> dict[str, targets.AdaptableModule]:
    """The matrices that adapters can go to: those of the layers, then the head and the table."""
    matrices = {
        path.removesuffix(".weight"): leaf
        for path, leaf in trees.flatten(infos).items()
        if leaf.is_matrix
    }
    matrices.pop(
        per_layer_embeddings.TABLE, None
    )  # A table beside the embedding takes no adapters.
    table = matrices.pop(targets.EMBEDDING)
    matrices.setdefault(targets.HEAD, table)
    matrices[targets.EMBEDDING] = table
    kinds: dict[str, Any] = {targets.HEAD: "head", targets.EMBEDDING: "embedding"}
    for path, leaf in matrices.items():
        kind = "experts" if leaf.has_experts else "router" if leaf.is_router else "linear"
        kinds.setdefault(path, kind)
    return {
        path: targets.AdaptableModule(leaf, hf_names(cfg, path), kinds[path])
        for path, leaf in matrices.items()
    }


def hidden(
    family: Family,
    cfg: Config,
    bound: trees.Tree,
    inputs: Inputs,
    *,
    dtype: Any,
    scan_layers: bool,
    remat: bool,
    dropout: layers.Dropout | None = None,
) -> tuple[jax.Array, moe.RouterSums | None]:
    """Embedding, layers and last norm.

    Args:
      family: the model's family.
      cfg: the model.
      bound: parameters from `params.bind`.
      inputs: tokens, positions and segments.
      dtype: dtype of the activations.
      scan_layers: scan over the stacks, or unroll them.
      remat: recompute every layer in the backward pass.
      dropout: dropout on the adapters' inputs, None outside training.

    Returns:
      The activations before the head, `[B, T, D]`; and the router's statistics, stacked over the
      layers with experts (None if no layer has experts).
    """
    bodies = _bodies(family, cfg, inputs, scan_layers=scan_layers, remat=remat, dropout=dropout)
    x_BTD = embedded(inputs.tokens_BT, bound, cfg, dtype)
    given = per_layer_embeddings.of_all_layers(inputs.tokens_BT, x_BTD, bound, cfg, dropout)
    model = stacks.of(cfg)
    of_stacks = bound_stacks(bound, model)
    if kv_sharing.is_shared(model):
        x_BTD, router = kv_sharing.run(
            bodies, x_BTD, model, of_stacks, given=given, scan_layers=scan_layers
        )
    else:
        (x_BTD, _), router = scan.run(
            bodies, (x_BTD, None), model, of_stacks, given=given, scan=scan_layers
        )
    return blocks.normed(x_BTD, bound["norm"], cfg), router


def _bodies(
    family: Family,
    cfg: Config,
    inputs: Inputs,
    *,
    scan_layers: bool,
    remat: bool,
    dropout: layers.Dropout | None,
) -> scan.Bodies:
    """The bodies of a model's layers, with what the model needs around them and nothing more."""
    model, angles = stacks.of(cfg), angles_of(cfg, inputs.positions_BT)
    is_sharing = kv_sharing.is_shared(model)
    is_padded = scan_layers and stacks.is_padded(model)

    def block(
        carry: kv_sharing.Carry, layer: scan.Layer, *, stack: int, static_kind: int | None
    ) -> tuple[kv_sharing.Carry, Any]:
        (x_BTD, shared), of_stack = carry, model[stack].cfg
        kind = layer.kind_number(static_kind)
        mix = _mixing(of_stack, kind, inputs)
        context = blocks.Context(
            rotate=functools.partial(layers.rope, angles=of_kind(of_stack, kind, angles)),
            mix=kv_sharing.mixing(mix, shared) if is_sharing else mix,
            is_token_BT=inputs.segment_ids_BT > 0,
            input_BTP=layer.given,
        )
        layer_dropout = None if dropout is None else dropout.for_layer(layer.number)
        out = family.block(x_BTD, layer.bound, context, of_stack, layer_dropout)
        return (out.x_BTD, shared), (out.mixed, out.router) if is_sharing else out.router

    @functools.cache  # Unrolled, layers of one kind are traced once.
    def bodies(stack: int, kind: int | None) -> scan.Body:
        body: scan.Body = functools.partial(block, stack=stack, static_kind=kind)
        body = scan.skipping(body) if is_padded else body
        return scan.rematted(body, scan=scan_layers, remat=remat)

    return bodies


def _mixing(cfg: Config, kind: scan.Kind, inputs: Inputs) -> Callable[..., tuple[jax.Array, None]]:
    """Attention, `(q, k, v) -> (mixed values, None)`, for a layer of the kind with this index."""
    windows = tuple(one.window for one in cfg.kinds)

    def mix(q: jax.Array, k: jax.Array, v: jax.Array, **more: jax.Array) -> tuple[jax.Array, None]:
        mixed = attention.causal_attention(
            q, k, v, segments_BT=inputs.segment_ids_BT, scale=cfg.attention_scale,
            softcap=cfg.attn_softcap, windows=windows, kind=kind, **more,
        )  # fmt: skip
        return mixed, None

    return mix


def bound_stacks(bound: trees.Tree, model: Sequence[stacks.Stack]) -> list[trees.Tree]:
    """The bound modules of each stack."""
    return [functools.reduce(lambda tree, name: tree[name], stack.path.split("."), bound)
            for stack in model]  # fmt: skip


def angles_of(cfg: Config, positions_BT: jax.Array) -> dict[Kind, tuple[jax.Array, jax.Array]]:
    """Cosines and sines of the rotary angles, for every kind of layers."""
    return {kind: layers.rope_angles(positions_BT, kind.rope) for kind in cfg.kinds}


def of_kind(cfg: Config, kind: scan.Kind, options: Mapping[Kind, Any]) -> Any:
    """The one of `options` that is for the kind with index `kind` among `cfg.kinds`."""
    return scan.of_kind(kind, [options[own] for own in cfg.kinds])


def embedded(tokens_BT: jax.Array, bound: trees.Tree, cfg: Config, dtype: Any) -> jax.Array:
    """The scaled embeddings of the tokens, `[B, T, D]`: the input of the first layer."""
    x_BTD = layers.embed(tokens_BT, bound[targets.EMBEDDING], dtype)
    # The factor is rounded to the activations' type, as the weights were trained.
    return x_BTD if cfg.embedding_scale == 1 else x_BTD * jnp.asarray(cfg.embedding_scale, dtype)


def head(bound: trees.Tree) -> params.Module:
    """The module that turns `hidden` into logits: weight [V, D], with the adapters of `lm_head`."""
    own, tied = bound.get(targets.HEAD), bound[targets.EMBEDDING]
    if own is not None and own.weight is not None:
        return own
    # The table itself, without the adapters that it has as an embedding.
    shared = tuple(adapter for adapter in tied.adapters if adapter.kind.is_of_table)
    adapters = (*(() if own is None else own.adapters), *shared)
    return dataclasses.replace(tied, name=targets.HEAD, adapters=adapters)
