"""Reads a config.json into what the decoder needs to know, and names all that is wrong with it."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from purelora.core import errors
from purelora.models import hf_layout, rope

# No model comes near these; a damaged file that does would be worked on for minutes.
_MOST_LAYERS, _LARGEST_SIZE = 10_000, 2**24
SLIDING, FULL = "sliding_attention", "full_attention"
_REMEDY = "take the model's original config.json"
# Fields by which some families compute otherwise, with the value that changes nothing. A family
# that never asks for one does not know it, so there it must have that value.
_OF_SOME_FAMILIES: Mapping[str, object] = {
    "attention_bias": False,
    "attention_k_eq_v": False,
    "attention_multiplier": 1,
    "attn_logit_softcapping": None,
    "attn_temperature_tuning": False,
    "embedding_multiplier": 1,
    "enable_moe_block": False,
    "final_logit_softcapping": None,
    "hidden_size_per_layer_input": 0,
    "is_causal": True,
    "layer_types": None,
    "logit_scale": 1,
    "logits_scaling": 1,
    "mlp_bias": False,
    "n_routed_experts": 0,
    "n_shared_experts": 0,
    "no_rope_layers": None,
    "num_experts": 0,
    "num_kv_shared_layers": 0,
    "num_local_experts": 0,
    "num_shared_experts": 0,
    "original_max_position_embeddings": None,
    "partial_rotary_factor": 1,
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1,
    "rope_interleaved": False,
    "rope_local_base_freq": None,
    "shared_expert_intermediate_size": 0,
    "swiglu_limit": None,
    "use_bidirectional_attention": False,
    "use_double_wide_mlp": False,
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the layers of one kind attend.

    Attributes:
      rope: rotation of queries and keys.
      window: how many positions a token sees, itself and those before it; None: all.
    """

    rope: rope.Rope
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class Clamp:
    """Of a gated activation whose parts are kept within limits; see `gpt_oss`.

    Attributes:
      alpha: factor of what the gate's sigmoid is of.
      limit: the most that gate and `up_proj` count, and of the latter the least, negative.
    """

    alpha: float
    limit: float


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixture of experts in place of an MLP.

    Attributes:
      count: number of routed experts.
      per_token: how many of them each token goes to.
      intermediate_size: width of each.
      is_normalised: whether the routing weights of a token's experts are made to sum to 1.
      files: how the family's files name experts, a key of `storage.CONVENTIONS`; it is used where
        there is no file to look at.
      clamp: bounds of their activation, if it has any.
    """

    count: int
    per_token: int
    intermediate_size: int
    is_normalised: bool = True
    files: str = hf_layout.NUMBERED
    clamp: Clamp | None = None


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Per-layer inputs, see `models/layer_inputs.py`.

    Attributes:
      size: size of a layer's input for a token.
      vocab_size: rows of the table of their embeddings.
    """

    size: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers whose parameters have other shapes than those of the model's other layers.

    Attributes:
      name: what the group is called in tree paths.
      layers: their numbers, ascending.
      changes: (name, value) of the fields of `Config` that are different for them.
    """

    name: str
    layers: tuple[int, ...]
    changes: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and settings of one decoder; named as in Hugging Face's config.json where it has them.

    Attributes:
      layer_kinds: how each layer attends.
      attention_scale: factor of the scores.
      attention_bias, mlp_bias: names of the modules that have a bias; those of experts too.
      norm_offset: what the stored weights of norms are less than their factors.
      attn_softcap, final_softcap: c in c·tanh(x / c) of the scores and of the logits; None: as is.
      embedding_scale: factor of the embeddings.
      experts: the mixture of experts, if the layers have one.
      layer_inputs: what the layers get besides the activations, if anything.
      keys_are_values: whether the values come from the projection of the keys (they are normed
        differently, and not rotated).
      shares_keys: whether the layers use the keys and values of an earlier layer: of the last layer
        of the same kind that has its own.
      groups: groups of layers whose parameters differ in shape, together every layer once; () if
        all layers are alike.
      prefix: how Hugging Face's names of the modules begin.
      max_position_embeddings: how many positions the model was made for; None if not stated.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    hidden_act: str
    layer_kinds: tuple[Kind, ...]
    attention_scale: float
    attention_bias: tuple[str, ...] = ()
    mlp_bias: tuple[str, ...] = ()
    norm_offset: float = 0.0
    attn_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    experts: Experts | None = None
    layer_inputs: LayerInputs | None = None
    keys_are_values: bool = False
    shares_keys: bool = False
    groups: tuple[Group, ...] = ()
    prefix: str = "model"
    max_position_embeddings: int | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of layers that there are, in the order in which they first come."""
        return tuple(dict.fromkeys(self.layer_kinds))

    @property
    def kind_numbers(self) -> tuple[int, ...]:
        """Number of each layer's kind among `kinds`."""
        kinds = self.kinds
        return tuple(kinds.index(kind) for kind in self.layer_kinds)


def architecture(config: Mapping[str, Any]) -> str | None:
    """The one name in a config.json's `architectures`; None if that is anything else."""
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        return names[0]
    return None


class Reader:
    """Reads fields of a config.json and collects what is wrong with them.

    A field that is wrong gets a stand-in, so that the others are read too; `config` raises then.
    """

    def __init__(self, fields: Mapping[str, Any], where: str):
        self.fields, self.where = fields, where
        self.problems: list[errors.Problem] = []
        self._asked: set[str] = set()

    def get(self, name: str, absent: object = None) -> Any:
        """A field as it is. All that reads fields does it here, so that it is known which were."""
        self._asked.add(name)
        return self.fields.get(name, absent)

    def check(
        self, good: object, name: str, value: object, what: str, remedy: str = _REMEDY
    ) -> None:
        """Notes a problem of the field `name` unless `good`; once, if it is found again."""
        problem = errors.Problem(f"{self.where}: {name}", value, what, remedy)
        if not good and problem not in self.problems:
            self.problems.append(problem)

    def size(self, name: str, absent: int | None = None, *, least: int = 1) -> int:
        """An integer, positive or from `least` on; `absent` is what leaving the field out means."""
        value = self.get(name)
        if value is None and absent is not None:
            return absent
        largest = _MOST_LAYERS if name == "num_hidden_layers" else _LARGEST_SIZE
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= largest:
            return value
        self.check(False, name, value, "is missing" if value is None else "is not a size")
        return 1

    def positive(self, name: str, absent: float | None = None) -> float:
        """A positive number; `absent` is what leaving the field out means, if it may be."""
        value = self.get(name)
        if value is None and absent is not None:
            return absent
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e30:
            return float(value)
        self.check(False, name, value, "is missing" if value is None else "is not a number > 0")
        return 1.0

    def flag(self, name: str, *, absent: bool = False) -> bool:
        """True or false; `absent` is what the format means where the field is left out."""
        value = self.get(name, absent)
        self.check(isinstance(value, bool), name, value, "is neither true nor false")
        return bool(value)

    def choice(self, name: str, known: str) -> str:
        """The one value that is supported, which is also the format's if the field is left out."""
        value = self.get(name, known)
        self.check(value == known, name, value, f"is not supported; only {known!r} is")
        return known

    def stated(self, name: str) -> bool:
        """Whether a field that the file must hold has another value than null."""
        found = self.get(name)
        self.check(name in self.fields, name, None, "is missing")
        return found is not None

    def spelling(self, *names: str) -> str:
        """Which of several names of one field the file has; the first if it has none."""
        first, *others = [name for name in names if self.get(name) is not None] or names[:1]
        for name in others:
            value = self.get(name)
            differs = f"is the same field as {first} = {self.get(first)!r}, and differs"
            self.check(value == self.get(first), name, value, differs)
        return first

    def unused(self, **neutral: object) -> None:
        """Refuses fields of another value than null or the neutral one."""
        for name, value in neutral.items():
            found = self.get(name)
            good = found is None or found == value
            what = "is not supported by this family"
            self.check(good, name, found, what, "docs/families.md has what is")

    def layer_types(self, absent: Sequence[str]) -> Sequence[str]:
        """The name of each layer's kind; `absent` is the family's own order of them."""
        types = self.get("layer_types")
        if types is None:
            return absent
        count = self.size("num_hidden_layers")
        if not isinstance(types, list) or len(types) != count:
            self.check(False, "layer_types", types, f"is not a list of {count} layers")
            return absent
        unknown = [name for name in types if name not in (SLIDING, FULL)]
        self.check(not unknown, "layer_types", unknown, f"are not among {SLIDING}, {FULL}")
        return absent if unknown else types

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Adds the problems of a ModelError raised inside."""
        try:
            yield
        except errors.ModelError as error:
            self.problems.extend(error.problems)

    def heads(self, *, has_kv_heads: bool = True, has_head_dim: bool = False) -> dict[str, Any]:
        """The numbers of heads and their size.

        Args:
          has_kv_heads: whether the file must state their number; else it may be that of all heads.
          has_head_dim: whether the file must state the size; else it may follow from the others.
        """
        heads, hidden = self.size("num_attention_heads"), self.size("hidden_size")
        is_derived = not has_head_dim and self.get("head_dim") is None
        kv_heads = self.size("num_key_value_heads", absent=None if has_kv_heads else heads)
        head_dim = max(hidden // heads, 1) if is_derived else self.size("head_dim")
        sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        if self.problems:
            return {**sizes, "head_dim": head_dim}
        divides = f"does not divide num_attention_heads = {heads}"
        self.check(heads % kv_heads == 0, "num_key_value_heads", kv_heads, divides)
        if is_derived:
            what = f"does not divide hidden_size = {hidden}, and there is no head_dim"
            self.check(hidden % heads == 0, "num_attention_heads", heads, what)
        name, value = ("num_attention_heads", heads) if is_derived else ("head_dim", head_dim)
        odd = f"makes heads of {head_dim}" if is_derived else "is odd"
        self.check(head_dim % 2 == 0, name, value, f"{odd}; rotary positions need pairs")
        return {**sizes, "head_dim": head_dim}

    def experts(
        self,
        count: str,
        width: str,
        *,
        per_token: str = "num_experts_per_tok",
        is_normalised: bool = True,
        files: str = hf_layout.NUMBERED,
    ) -> Experts:
        """The mixture of experts; `count`, `width` and `per_token` name the fields."""
        experts, chosen = self.size(count), self.size(per_token)
        self.check(chosen <= experts, per_token, chosen, f"is more than {count} = {experts}")
        return Experts(experts, chosen, self.size(width), is_normalised, files)

    def equal_layers(
        self, head_dim: int, window: int | None = None, *, absent_theta: float | None = None
    ) -> tuple[Kind, ...]:
        """Layers that all attend alike, with the file's one rotation."""
        kind = Kind(self.one_rope(head_dim, absent_theta=absent_theta), window)
        return (kind,) * self.size("num_hidden_layers")

    def one_rope(self, head_dim: int, *, absent_theta: float | None = None) -> rope.Rope:
        """The rotation, if it is the same in all layers; see `rope.read`."""
        with self.noting():
            return rope.read(self.fields, head_dim, self.where, absent_theta=absent_theta)
        return rope.Rope(())

    def nested_rope(self, kind: str, theta: str, head_dim: int) -> rope.Rope:
        """The rotation of one kind of layers; see `rope.read_nested`."""
        self._asked.add(theta)
        with self.noting():
            return rope.read_nested(self.fields, kind, theta, head_dim, self.where)
        return rope.Rope(())

    def config(self, *, is_tied: bool = False, **settings: Any) -> Config:
        """The settings with what all decoders have; scores are scaled as usual unless they say how.

        Args:
          is_tied: whether the head is the embedding where the file does not say.
          settings: the other attributes of `Config`.

        Raises:
          ModelError: all that was found wrong.
        """
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        sizes: dict[str, Any] = {name: self.size(name) for name in names}
        longest = "max_position_embeddings"
        sizes[longest] = None if self.get(longest) is None else self.size(longest)
        eps = self.positive("rms_norm_eps")
        tied = self.flag("tie_word_embeddings", absent=is_tied)
        unknown = {k: v for k, v in _OF_SOME_FAMILIES.items() if k not in self._asked}
        self.unused(**unknown)
        if self.problems:
            raise errors.ModelError.of(self.problems)
        settings.setdefault("attention_scale", settings["head_dim"] ** -0.5)
        return Config(**sizes, rms_norm_eps=eps, tie_word_embeddings=tied, **settings)
