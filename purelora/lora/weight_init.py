"""Adapters taken out of the weights while these are read: PiSSA, OLoRA and LoftQ.

The base then holds what is left of a weight, so it can only be rebuilt with the same adapters:
they are kept with every checkpoint (`initial`), and a resumed run subtracts those instead of
factoring again, which need not give the same bits. For the original base the trained adapter counts
less the initial one: an adapter of rank 2r (see `artefact`).
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import trees
from purelora.lora import targets
from purelora.ops import quant


class Factors(NamedTuple):
    """The adapter that a weight was split into: `lora_a` [K, r] and `lora_b` [r, N], float32."""

    lora_a: jax.Array
    lora_b: jax.Array


class WeightSplit:
    """Splits the weights of adapted modules into an initial adapter and the base's share.

    The one object that loading fills: layers come one at a time and their factors are kept here.
    """

    def __init__(
        self,
        init: str,
        adapted: Mapping[str, targets.Target],
        saved: Mapping[str, np.ndarray] | None = None,
    ):
        """With `saved` factors, by leaf path (`….lora_a` [n, K, r]), no new ones are made."""
        self._init = init
        self._targets = adapted
        self._saved = saved
        self._found: dict[str, list[Factors]] = {path: [] for path in adapted}

    def place(self, weight_path: str, layer: int) -> tuple[str, int] | None:
        """The module and the position among its adapted layers; None if that layer has none."""
        path = weight_path.removesuffix(".weight")
        if path == weight_path or path not in self._targets:
            return None
        layers = self._targets[path].layers or (0,)
        return (path, layers.index(layer)) if layer in layers else None

    def __call__(self, place: tuple[str, int], weight_KN: jax.Array, like: Any) -> jax.Array:
        """The base's share of a weight, float32; its factors are kept.

        Args:
          place: from `place`.
          weight_KN: the weight as read.
          like: declaration of the base's weight, a QArray where it is quantised.
        """
        path, position = place
        target = self._targets[path]
        r, scaling = target.ranks[position], target.scalings[position]
        if self._saved is None:
            factors = _factors(self._init, weight_KN, r, scaling, like)
        else:
            a, b = (self._saved[f"{path}.{name}"] for name in ("lora_a", "lora_b"))
            if target.layers:
                a, b = a[position], b[position]
            factors = Factors(jnp.asarray(a[:, :r]), jnp.asarray(b[:r]))
        padding = target.r - r
        self._found[path].append(
            Factors(
                jnp.pad(factors.lora_a, ((0, 0), (0, padding))),
                jnp.pad(factors.lora_b, ((0, padding), (0, 0))),
            )
        )
        # LoftQ's adapter makes up for the quantisation of the weight, which stays what it is.
        return weight_KN if self._init == "loftq" else _residual(weight_KN, factors, scaling)

    def tree(self) -> trees.Tree:
        """The initial adapters, in the layout of the trained ones, on the host.

        There they stay what they are when the trained ones are donated.
        """
        flat: dict[str, Any] = {}
        for path, layers in self._found.items():
            stacked = bool(self._targets[path].layers)
            for name in Factors._fields:
                arrays = [np.array(getattr(factors, name)) for factors in layers]
                flat[f"{path}.{name}"] = np.stack(arrays) if stacked else arrays[0]
        return trees.unflatten(flat)


def svd_factors(weight_KN: jax.Array, r: int, scaling: float) -> Factors:
    """The `r` largest singular values of a weight as an adapter (Meng et al. 2024, PiSSA)."""
    u, s, vh = jnp.linalg.svd(weight_KN.astype(jnp.float32), full_matrices=False)
    root = jnp.sqrt(s[:r] / scaling)
    return Factors(u[:, :r] * root[None, :], root[:, None] * vh[:r])


def qr_factors(weight_KN: jax.Array, r: int) -> Factors:
    """The first `r` columns of Q and rows of R of the `[N, K]` weight (Büyükakyüz 2024, OLoRA)."""
    q, upper = jnp.linalg.qr(weight_KN.astype(jnp.float32).T)
    return Factors(upper[:r].T, q[:, :r].T)


def residual(weight_KN: jax.Array, factors: Factors, scaling: float) -> jax.Array:
    """What is left of a weight beside the adapter that was taken out of it."""
    return weight_KN.astype(jnp.float32) - scaling * (factors.lora_a @ factors.lora_b)


_residual = jax.jit(residual, static_argnums=2)


def _factors(init: str, weight_KN: jax.Array, r: int, scaling: float, like: Any) -> Factors:
    if init == "loftq":
        return svd_factors(_quantisation_error(weight_KN, like), r, scaling)
    if init == "pissa":
        return svd_factors(weight_KN, r, scaling)
    return qr_factors(weight_KN, r)


def _quantisation_error(weight_KN: jax.Array, like: Any) -> jax.Array:
    return weight_KN - jax.jit(functools.partial(_rounded, like=like))(weight_KN)


def _rounded(weight_KN: jax.Array, like: Any) -> jax.Array:
    return quant.dequantise(quant.quantise(weight_KN, like)).astype(jnp.float32)
