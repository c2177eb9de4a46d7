"""Trained rows of the embedding table (PEFT's `trainable_token_indices`), beside any adapters."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purelora.core import errors, param_info
from purelora.core.paths import Path
from purelora.lora.kinds import base
from purelora.lora.targets import EMBEDDING, Adaptation, Target
from purelora.ops import quant, quant_matmul

LEAF = "trainable_tokens"


class TokenRows(base.Kind):
    """New values (not differences) of some rows; a tied head sees them too."""

    name = "token_rows"
    title = "rows of the embedding"
    flag = "trainable_token_indices"
    places = frozenset(("embedding",))
    order = (LEAF,)
    tensors = {LEAF: base.Tensor("token_adapter.trainable_tokens_delta")}
    is_of_table = True
    path = Path(EMBEDDING) / LEAF

    def declared(self, table: param_info.ParamInfo, count: int) -> param_info.ParamInfo:
        """Declaration of `count` rows `[n, D]` of a table, in float32."""
        shape, axes = (count, table.shape[1]), (None, table.axes[1])
        return dataclasses.replace(table, shape=shape, axes=axes, dtype="float32")

    def of_table(self, table: quant.Weight, token_ids: Sequence[int]) -> jax.Array:
        """The rows as the base has them, float32: what they begin with."""
        return quant.take_rows(table, jnp.asarray(token_ids), jnp.dtype("float32"))

    def bound(self, rows: jax.Array, token_ids: tuple[int, ...]) -> base.Bound:
        """The rows for a forward pass."""
        return base.Bound((rows,), self, self.order, token_ids)

    def output(self, bound: base.Bound, y: jax.Array, call: base.Call) -> jax.Array:
        """Rows of the table are outputs of the head."""
        rows = quant_matmul.dot(call.x, bound[LEAF], -1, y.dtype)
        columns = call.local_rows(jnp.asarray(bound.token_ids), y.shape[-1])
        return y.at[..., columns].set(rows, mode="drop")

    def embedded(self, bound: base.Bound, x_BTD: jax.Array, lookup: base.Lookup) -> jax.Array:
        ids = np.asarray(bound.token_ids, np.int32)[None, None]
        is_token = lookup.tokens_BT[..., None] == ids
        rows_BTD = bound[LEAF][jnp.argmax(is_token, axis=-1)].astype(lookup.dtype)
        return jnp.where(is_token.any(axis=-1, keepdims=True), rows_BTD, x_BTD)

    def peft_leaves(self, target: Target) -> dict[str, base.Leaf]:
        del target
        return {LEAF: base.Leaf(LEAF)}

    def with_rows(
        self, table: np.ndarray, tensors: base.Arrays, token_ids: Sequence[int]
    ) -> np.ndarray:
        """A table `[V, D]` with the trained rows in it."""
        result = table.copy()
        result[list(token_ids)] = tensors[LEAF].astype(np.float32)
        return result

    def conflicts(self, adaptation: Adaptation, *, is_tied: bool) -> list[errors.Problem]:
        del is_tied
        ids: Any = adaptation.token_ids
        remedy, problems = "leave one of the two out", []
        if ids and f"{EMBEDDING}.weight" in adaptation.full:
            what = "are rows of a table that modules_to_save trains whole"
            problems.append(errors.Problem(f"lora.{self.flag}", ids, what, remedy))
        if ids and EMBEDDING in adaptation.targets:
            what = "does not go with adapters on the embedding"
            problems.append(errors.Problem(f"lora.{self.flag}", ids, what, remedy))
        return problems
