"""What an adapter kind says of itself: one class, asked by everything that meets an adapter.

A kind is a file with a subclass of `Kind` and one object of it in `kinds.KINDS`. It declares its
leaves for ONE layer of a module (`declare`); stacks, specs, optimiser state, checkpoints and PEFT's
folders follow from that. The methods of the forward pass take a `Bound`, the leaves of one module.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import jax
import numpy as np

from purelora.core import errors, param_info
from purelora.lora.targets import EMBEDDING, AdaptableModule, Adaptation, Target
from purelora.ops import grouped_matmul

# How a leaf's dimensions lie in PEFT's tensor: with the last two swapped, or a vector as `[n, 1]`
# or `[1, n]`.
Layout = Literal["same", "transposed", "column", "row"]
Arrays = Mapping[str, np.ndarray]


class Tensor(NamedTuple):
    """A tensor in PEFT's files.

    Attributes:
      key: the end of its key as PEFT writes it.
      n_dims: how many dimensions it may have.
      older_end: what versions of PEFT added to the key.
    """

    key: str
    n_dims: tuple[int, ...] = (2,)
    older_end: str = ""


class Leaf(NamedTuple):
    """Where a trained leaf is in PEFT's files.

    Attributes:
      tensor: name of the tensor.
      layout: how the tensor's dimensions lie.
      rank_axis: the leaf's dimension of the rank, counted from the end; None for none.
    """

    tensor: str
    layout: Layout = "same"
    rank_axis: int | None = None

    def shape(self, shape: Sequence[int], r: int) -> tuple[int, ...]:
        """The part of a leaf's shape that rank `r` takes; the rest is padding."""
        sizes = list(shape)
        if self.rank_axis is not None:
            sizes[self.rank_axis] = r
        return tuple(sizes)

    def in_peft(self, array: np.ndarray) -> np.ndarray:
        """A leaf of one layer in the shape of the tensor."""
        if self.layout == "transposed":
            return np.swapaxes(array, -1, -2)
        return {"column": array[..., None], "row": array[None]}.get(self.layout, array)

    def from_peft(self, array: np.ndarray) -> np.ndarray:
        """The inverse of `in_peft`."""
        if self.layout == "transposed":
            return np.swapaxes(array, -1, -2)
        return array if self.layout == "same" else array.reshape(-1)


class BoundModule(Protocol):
    """What a kind reads of the module that it adapts, see `models.params.Module`."""

    @property
    def weight(self) -> Any: ...
    @property
    def gather(self) -> Callable[[Any], Any]: ...
    @property
    def parallel(self) -> Any: ...
    @property
    def contracting(self) -> int | None: ...


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values"],
    meta_fields=["kind", "names", "token_ids"],
)
@dataclasses.dataclass(frozen=True)
class Bound:
    """The leaves of one kind at one module, as a forward pass has them.

    Attributes:
      values: the leaves, and the `scaling` (float32, 0 in layers without an adapter) among them.
      kind: their kind.
      names: the name of each value.
      token_ids: which rows of a table they are; only of token rows.
    """

    values: tuple[jax.Array | None, ...]
    kind: "Kind"
    names: tuple[str, ...]
    token_ids: tuple[int, ...] = ()

    def __getitem__(self, name: str) -> jax.Array:
        value = self.values[self.names.index(name)]
        assert value is not None, name
        return value

    def split(self) -> tuple["Bound", "Bound"]:
        """What is trained, and what is not (the scaling); `joined` is the inverse."""
        is_trained = [name != "scaling" for name in self.names]
        pairs = list(zip(self.values, is_trained, strict=True))
        trained = tuple(value if trained else None for value, trained in pairs)
        constant = tuple(None if trained else value for value, trained in pairs)
        return (
            dataclasses.replace(self, values=trained),
            dataclasses.replace(self, values=constant),
        )

    def joined(self, other: "Bound") -> "Bound":
        """The parts of `split` as one again."""
        pairs = zip(self.values, other.values, strict=True)
        return dataclasses.replace(self, values=tuple(b if a is None else a for a, b in pairs))


class Call(NamedTuple):
    """One product with an adapted module.

    Attributes:
      x: the module's input, `[..., K]`.
      adapter_x: the same, with dropout while training.
      module: the module.
      base_product: the product of any input with the module's own weight.
      local_rows: from token ids to this device's columns among so many; elsewhere, their count.
    """

    x: jax.Array
    adapter_x: jax.Array
    module: BoundModule
    base_product: Callable[[jax.Array], jax.Array]
    local_rows: Callable[[jax.Array, int], jax.Array]


class Lookup(NamedTuple):
    """One look-up in an adapted embedding table.

    Attributes:
      tokens_BT: the token ids.
      rows_BT: the same as rows of this device's part of the table.
      dtype: that of the result.
    """

    tokens_BT: jax.Array
    rows_BT: jax.Array
    dtype: Any


class Kind:
    """One kind of adapter. The methods here are those of a kind that does nothing.

    Attributes:
      name: value of `lora.peft_type` and of `Target.kind`.
      title: its name for people.
      flag: the setting (a bool of `lora.*`, and of PEFT's config) that chooses it instead of
        `lora.peft_type`; empty for none.
      peft_type: PEFT's name of the method, the `peft_type` of adapter_config.json.
      places: the kinds of modules that it can adapt.
      order: names of the leaves, and of the scaling among them.
      tensors: its tensors in PEFT's files.
      sets: tensors that come together; a module with one set is adapted.
      without: settings of `lora.*` that have no meaning for it, with the value that unsets them.
      peft_keys: the keys of PEFT's config, each with the field of `AdapterConfig` that it fills;
        None for those of LoRA.
      peft_patterns: keys of PEFT's config that name modules, beside those of `AdapterConfig`.
      peft_history: keys that change nothing for a trained adapter, with what PEFT has by default.
      is_ranked: whether it has a rank and an alpha; of others both count as 1.
      takes_dropout: whether `lora.lora_dropout` thins out what it reads.
      is_of_table: whether it changes the weight itself, so that a tied head sees it too.
      begins_at_weight: whether some of its leaves begin as the weight says, see `from_weight`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    flag: ClassVar[str] = ""
    peft_type: ClassVar[str] = "LORA"
    places: ClassVar[frozenset[str]] = frozenset(("linear", "head"))
    order: ClassVar[tuple[str, ...]] = ()
    tensors: ClassVar[Mapping[str, Tensor]] = {}
    sets: ClassVar[tuple[tuple[str, ...], ...]] = ()
    without: ClassVar[Mapping[str, Any]] = {}
    peft_keys: ClassVar[Mapping[str, str] | None] = None
    peft_patterns: ClassVar[tuple[str, ...]] = ()
    peft_history: ClassVar[Mapping[str, Any]] = {}
    is_ranked: ClassVar[bool] = True
    takes_dropout: ClassVar[bool] = False
    is_of_table: ClassVar[bool] = False
    begins_at_weight: ClassVar[bool] = False

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of its trained leaves."""
        return tuple(name for name in self.order if name != "scaling")

    @property
    def suffix(self) -> str:
        """What its title says beyond LoRA, for after a rank and a scaling."""
        return f" of {self.title}"

    @property
    def setting(self) -> tuple[str, object]:
        """The key that chooses it, and its value there."""
        return (f"lora.{self.flag}", True) if self.flag else ("lora.peft_type", self.name)

    # ---- declarations and initial values -------------------------------------------------------

    def variant(self, name: str, patterns: Mapping[str, Any]) -> str:
        """`Target.variant` of the module called `name`.

        `patterns` are the `peft_patterns` of an adapter that was read; empty for a run's own.
        """
        del name, patterns
        return ""

    def patterns_of(
        self, variants: Mapping[str, str], entries: Sequence[str]
    ) -> dict[str, tuple[str, ...]]:
        """`peft_patterns` for an adapter that is written; the inverse of `variant`.

        Args:
          variants: the variant of each module by name.
          entries: the names and suffixes of `target_modules`.
        """
        del variants, entries
        return {}

    def declare(
        self, weight: param_info.ParamInfo, target: Target, init: str
    ) -> dict[str, param_info.ParamInfo]:
        """Declarations of its leaves for one layer of a module.

        Args:
          weight: that of the layer's weight.
          target: which adapters.
          init: `lora.init_lora_weights`.
        """
        raise NotImplementedError

    def rescaled(
        self, leaves: dict[str, Any], infos: Mapping[str, param_info.ParamInfo], target: Target
    ) -> dict[str, Any]:
        """Initial random leaves `[n, ...]` where the layers of a stack have different ranks."""
        del infos, target
        return leaves

    def from_weight(self, weight_KN: jax.Array) -> dict[str, jax.Array]:
        """Initial values, by leaf, of a kind that `begins_at_weight`, for one layer."""
        raise NotImplementedError

    # ---- the forward pass ----------------------------------------------------------------------

    def input(self, bound: Bound, x: jax.Array) -> jax.Array:
        """The input that the module's own weight is multiplied with."""
        del bound
        return x

    def output(self, bound: Bound, y: jax.Array, call: Call) -> jax.Array:
        """The module's output, before the sum over devices that hold other inputs."""
        del bound, call
        return y

    def grouped_output(
        self, bound: Bound, y_RN: jax.Array, x_RK: jax.Array, groups: grouped_matmul.RowGroups
    ) -> jax.Array:
        """The output of a module of experts for rows that are sorted by expert."""
        del bound, x_RK, groups
        return y_RN

    def bias(self, bound: Bound, bias: jax.Array, module: BoundModule) -> jax.Array:
        """What the module adds to the output, given its own bias."""
        del bound, module
        return bias

    def embedded(self, bound: Bound, x_BTD: jax.Array, lookup: Lookup) -> jax.Array:
        """The rows that were looked up in a table."""
        del bound, lookup
        return x_BTD

    # ---- weights and files ---------------------------------------------------------------------

    def peft_leaves(self, target: Target) -> dict[str, Leaf]:
        """Its leaves in PEFT's files."""
        raise NotImplementedError

    def rank_of(self, tensor: np.ndarray) -> int | None:
        """The rank by the first tensor of one of its sets; None if it has no rank."""
        del tensor
        return None

    def updated(self, weight: np.ndarray, tensors: Arrays, scaling: np.float32) -> np.ndarray:
        """A weight `[out, in]` (of experts `[E, out, in]`) with the adapter in it, float32.

        Args:
          weight: the base's values.
          tensors: the module's tensors in PEFT's shapes.
          scaling: factor of what is added.
        """
        raise NotImplementedError

    def updated_bias(self, bias: np.ndarray, tensors: Arrays) -> np.ndarray:
        """A bias with the adapter in it."""
        del tensors
        return bias

    def tensor_problems(self, tensors: Arrays) -> list[tuple[object, str]]:
        """How one module's tensors do not fit each other: values and what is wrong."""
        del tensors
        return []

    # ---- refusals ------------------------------------------------------------------------------

    def conflicts(self, adaptation: Adaptation, *, is_tied: bool) -> list[errors.Problem]:
        """Where it does not go with what else is trained, by the targets that are of this kind."""
        del is_tied
        target = adaptation.targets.get(EMBEDDING)
        if target is None or target.kind != self.name or "embedding" in self.places:
            return []
        what = "does not go with adapters on the embedding"
        return [errors.Problem(*self.setting, what, f"exclude {target.names[0]}")]

    def adapts(self, module: AdaptableModule) -> bool:
        """Whether it can go to a module."""
        return module.kind in self.places
