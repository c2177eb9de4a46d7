"""Arithmetic of a training step, counted from the declarations.

A matrix of n elements costs 2·n operations per token forward and as many for the gradient of its
input; a trained one as many again for its own gradient. Recomputation (remat) is not counted, as is
usual for model FLOP/s utilisation (Chowdhery et al. 2022, appendix B).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from purelora.core import param_info
from purelora.lora import targets
from purelora.models import per_layer_embeddings


def per_token(
    infos: Mapping[str, param_info.ParamInfo],
    adapters: Mapping[str, param_info.ParamInfo],
    *,
    trained_weights: Collection[str],
    experts_share: float,
    attention_widths: Sequence[int],
    windows: Sequence[int | None],
    length: int,
) -> float:
    """Operations per token of one training step.

    Args:
      infos: flat declarations of the base.
      adapters: flat declarations of the adapters.
      trained_weights: paths of the base's matrices that get gradients of their own.
      experts_share: experts of a token / experts of a layer; 1 for a model without experts.
      attention_widths: query heads × head dim of each layer.
      windows: how many tokens each layer sees at most; None: all before.
      length: tokens of a row.
    """
    base = sum(
        _used(leaf, experts_share) * (3 if path in trained_weights else 2)
        for path, leaf in infos.items()
        if _is_multiplied(path, leaf, infos)
    )
    small = sum(_used(leaf, experts_share) for leaf in adapters.values())
    seen = zip(attention_widths, windows, strict=True)
    # The two products of attention, per 2 operations.
    scores = 2 * sum(width * _seen(length, window) for width, window in seen)
    return 2.0 * (base + 3 * small + 3 * scores)


def _seen(length: int, window: int | None) -> float:
    """How many tokens one of a row of `length` sees on average."""
    width = length if window is None else min(window, length)
    return width - width * width / (2 * length)


def _is_multiplied(path: str, leaf: param_info.ParamInfo, infos: Mapping[str, Any]) -> bool:
    """Whether a matmul uses the leaf: tables are looked up, but a tied one is the head as well."""
    if not leaf.is_matrix:
        return False
    if path == f"{per_layer_embeddings.TABLE}.weight":
        return False
    return path != f"{targets.EMBEDDING}.weight" or f"{targets.HEAD}.weight" not in infos


def _used(leaf: param_info.ParamInfo, experts_share: float) -> float:
    """How many elements a token is multiplied with: of experts, those that it is routed to."""
    return math.prod(leaf.shape) * (experts_share if leaf.has_experts else 1)
