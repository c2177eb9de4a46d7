"""LoRA adapters as pure functions of declarations and rules.

    base infos                                   adapter infos
    layers.self_attn.q_proj.weight [L, D, N]  ─▶ layers.self_attn.q_proj.lora_a [n, D, r]
                                                 layers.self_attn.q_proj.lora_b [n, r, N]

A module computes `y = x W + scaling · (x A) B`. `n` is the number of layers of the stack that are
adapted: all L, unless `target_modules` names only some. Then the adapters are stored for these
layers alone (so counts, gradients and exports hold nothing else) and spread over the stack when the
forward pass begins (`expand`).

Modules are named as Hugging Face names them (`model.layers.7.self_attn.q_proj`), and targets are
matched against these names by PEFT's rules.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from purelora import errors, info
from purelora import tree as trees

ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True)
class LinearModule:
    """A matrix of the model that adapters can go to.

    Attributes:
      weight: declaration of the (stacked) weight.
      names: Hugging Face module name of each layer of the stack; one name if it is not stacked.
      is_output: whether it is the output head, which `all-linear` leaves out.
    """

    weight: info.ParamInfo
    names: tuple[str, ...]
    is_output: bool = False

    @property
    def is_stacked(self) -> bool:
        return len(self.weight.shape) > 2


@dataclasses.dataclass(frozen=True)
class Target:
    """The adapters of one (stacked) module.

    Attributes:
      layers: positions in the stack that are adapted, ascending; empty if it is not stacked.
      names: Hugging Face names of the adapted modules.
      r: rank.
      scaling: factor of the adapter's output, alpha / r.
    """

    layers: tuple[int, ...]
    names: tuple[str, ...]
    r: int
    scaling: float


def matches(pattern: str | Sequence[str], name: str) -> bool:
    """PEFT's rule: a string is a regex for the full name, a list holds names or dotted suffixes."""
    if isinstance(pattern, str):
        return re.fullmatch(pattern, name) is not None
    return any(name == entry or name.endswith(f".{entry}") for entry in pattern)


def resolve_targets(
    modules: Mapping[str, LinearModule],
    *,
    r: int,
    lora_alpha: float,
    target_modules: str | Sequence[str],
    exclude_modules: str | Sequence[str],
) -> dict[str, Target]:
    """Which layers of which modules get adapters.

    Args:
      modules: what the model offers, by tree path (`layers.self_attn.q_proj`).
      r: rank of every adapter.
      lora_alpha: numerator of the scaling.
      target_modules: `all-linear` (all but the output head), a regex for the whole name, or a list
        of names or dotted suffixes.
      exclude_modules: modules to leave out, a regex or a list; empty for none.

    Raises:
      ConfigError: nothing matches, or an entry of a list matches nothing.
    """
    names = [name for module in modules.values() for name in module.names]
    _check_patterns(target_modules, exclude_modules, names)
    targets: dict[str, Target] = {}
    for path, module in modules.items():
        chosen = [
            i
            for i, name in enumerate(module.names)
            if _is_target(target_modules, name, module)
            and not (exclude_modules and matches(exclude_modules, name))
        ]
        if chosen:
            picked = tuple(module.names[i] for i in chosen)
            layers = tuple(chosen) if module.is_stacked else ()
            targets[path] = Target(layers, picked, r, lora_alpha / r)
    if not targets:
        raise errors.ConfigError(
            "lora.target_modules",
            target_modules,
            "matches no linear module" + (" that is not excluded" if exclude_modules else ""),
            _offer(names),
        )
    return targets


def _check_patterns(
    target_modules: str | Sequence[str], exclude_modules: str | Sequence[str], names: Sequence[str]
) -> None:
    """Raises ConfigError for all entries that match nothing."""
    if exclude_modules == ALL_LINEAR:
        raise errors.ConfigError(
            "lora.exclude_modules", exclude_modules, "would leave out everything", _offer(names)
        )
    problems = [
        *_unmatched("lora.target_modules", target_modules, names),
        *_unmatched("lora.exclude_modules", exclude_modules, names),
    ]
    if problems:
        raise errors.ConfigError.of(problems)


def _is_target(pattern: str | Sequence[str], name: str, module: LinearModule) -> bool:
    if pattern == ALL_LINEAR:
        return not module.is_output
    return matches(pattern, name)


def _unmatched(
    key: str, pattern: str | Sequence[str], names: Sequence[str]
) -> list[errors.Problem]:
    """A problem for each entry of a list (or the regex) that matches no linear module."""
    if not pattern or pattern == ALL_LINEAR:
        return []
    if isinstance(pattern, str):
        try:
            re.compile(pattern)
        except re.error as error:
            return [errors.Problem(key, pattern, f"is not a regular expression: {error}", "")]
    entries = [pattern] if isinstance(pattern, str) else [[entry] for entry in pattern]
    return [
        errors.Problem(
            key,
            entry if isinstance(entry, str) else entry[0],
            "matches no linear module of this model",
            _remedy(entry, names),
        )
        for entry in entries
        if not any(matches(entry, name) for name in names)
    ]


def _remedy(entry: str | Sequence[str], names: Sequence[str]) -> str:
    """What else to write; a lone module name where a regex is expected is the usual slip."""
    if isinstance(entry, str) and any(matches([entry], name) for name in names):
        return f"a string is a regex for the whole name ({names[0]}); for a name write [{entry!r}]"
    return _offer(names)


def _offer(names: Sequence[str]) -> str:
    short = dict.fromkeys(name.rsplit(".", 1)[-1] for name in names)
    return f"it has {', '.join(short)} (for example {names[0]}), or use 'all-linear'"


def adapter_infos(modules: Mapping[str, LinearModule], targets: Mapping[str, Target]) -> trees.Tree:
    """Declarations of `lora_a` [n, K, r] and `lora_b` [n, r, N] of every target, in float32.

    K is the weight's contracting dimension and N the other one; each takes the logical axis of the
    weight's dimension it comes from, so adapter specs follow the base kernel's spec axis by axis.
    """
    flat: dict[str, info.ParamInfo] = {}
    for path, target in targets.items():
        weight = modules[path].weight
        k, n = weight.matrix_dims
        lead = ((len(target.layers),), ("layers",)) if target.layers else ((), ())
        flat[f"{path}.lora_a"] = info.ParamInfo(
            shape=(*lead[0], weight.shape[k], target.r),
            dtype="float32",
            axes=(*lead[1], weight.axes[k], "rank"),
            init="he_uniform",
            contracting=-2,
        )
        flat[f"{path}.lora_b"] = info.ParamInfo(
            shape=(*lead[0], target.r, weight.shape[n]),
            dtype="float32",
            axes=(*lead[1], "rank", weight.axes[n]),
            init="zeros",
            contracting=-2,
        )
    return trees.unflatten(flat)


def is_adapter(path: str) -> bool:
    """Whether the leaf at `path` is part of an adapter."""
    return path.rpartition(".")[2].startswith("lora_")


def expand(adapter: jax.Array, layers: Sequence[int], stack_size: int) -> jax.Array:
    """Spreads the adapters of some layers over a whole stack; the other layers get zeros.

    `[n, ...] -> [stack_size, ...]`. Zeros in both `lora_a` and `lora_b` add nothing, and the
    gradient of the spread reaches only the stored layers.
    """
    if len(layers) == stack_size:
        return adapter
    full = jnp.zeros((stack_size, *adapter.shape[1:]), adapter.dtype)
    return full.at[np.asarray(layers)].set(adapter)


@jax.custom_vjp
def delta(x: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scaling: jax.Array) -> jax.Array:
    """`scaling · (x A) B` in the dtype of `x` (Hu et al. 2021, section 4.1).

    Differentiable in all but `scaling`. The gradients are written out because autodiff's own ask
    for the transpose of `x` and of the cotangent, and on CPU these copies cost as much time as the
    large matmuls of the step.

    Args:
      x: `[..., K]`.
      lora_a: `[K, r]`.
      lora_b: `[r, N]`.
      scaling: float32 scalar.
    """
    return _delta_fwd(x, lora_a, lora_b, scaling)[0]


_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def _delta_fwd(
    x: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scaling: jax.Array
) -> tuple[jax.Array, _Saved]:
    xa = checkpoint_name(x @ lora_a.astype(x.dtype), "lora_xa")
    y = (xa * scaling.astype(x.dtype)) @ lora_b.astype(x.dtype)
    return y, (x, xa, lora_a, lora_b, scaling)


def _delta_bwd(saved: _Saved, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    x, xa, lora_a, lora_b, scaling = saved
    x_TK, xa_TR, g_TN = (array.reshape(-1, array.shape[-1]) for array in (x, xa, g))
    g_TR = _dot(g_TN, lora_b.astype(g.dtype), 1, 1) * scaling.astype(g.dtype)
    d_b = _dot(xa_TR, g_TN, 0, 0, jnp.float32) * scaling
    d_a = _dot(x_TK, g_TR, 0, 0, jnp.float32)
    d_x = _dot(g_TR, lora_a.astype(g.dtype), 1, 1).reshape(x.shape)
    return d_x, d_a.astype(lora_a.dtype), d_b.astype(lora_b.dtype), None


def _dot(x: jax.Array, y: jax.Array, of_x: int, of_y: int, out: Any = None) -> jax.Array:
    """Contracts dimension `of_x` of `x` with dimension `of_y` of `y`."""
    dims = (((of_x,), (of_y,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=out)


delta.defvjp(_delta_fwd, _delta_bwd)


def merged(weight: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scaling: float) -> jax.Array:
    """`W + scaling · A B` for a `[..., K, N]` weight: the base with its adapter folded in."""
    return weight + scaling * (lora_a @ lora_b)
