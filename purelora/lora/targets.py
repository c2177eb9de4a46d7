"""What is trained beside a frozen base: adapters by module, leaves in full, rows of the embedding.

Modules are named as Hugging Face names them (`model.layers.7.self_attn.q_proj`), and PEFT's rules
over these names are here. `resolve` makes an `Adaptation` of the settings of `lora.*`.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from purelora.config import schema
from purelora.core import param_info

ALL_LINEAR = schema.TARGET_WORDS[0]
# Matrices of experts that are one parameter in transformers, and so in PEFT; first rows first.
JOINED: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj")}
# Mixtral's names of matrices before version 5 of transformers.
OLDER_MATRICES: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
EMBEDDING, HEAD = "embed_tokens", "lm_head"  # Tree paths, the same in every family.


@dataclasses.dataclass(frozen=True)
class AdaptableModule:
    """A matrix of the model that adapters can go to.

    Attributes:
      weight: declaration of the (stacked) weight.
      names: Hugging Face module name of each layer of the stack; one name if it is not stacked.
      kind: `all-linear` takes the linear ones and the experts; it leaves out routers, the output
        head and the embedding.
    """

    weight: param_info.ParamInfo
    names: tuple[str, ...]
    kind: Literal["linear", "experts", "router", "head", "embedding"] = "linear"

    @property
    def is_layer(self) -> bool:
        """Whether a word such as `all-linear` may choose it."""
        return self.kind in ("linear", "experts")

    @property
    def is_parameter(self) -> bool:
        """Whether PEFT adapts it as a parameter, as it is no linear module in transformers."""
        return self.kind in ("experts", "router")

    @property
    def is_stacked(self) -> bool:
        return self.weight.is_stacked


@dataclasses.dataclass(frozen=True)
class Target:
    """The adapters of one (stacked) module, with an entry of each tuple for each adapted layer.

    Attributes:
      layers: positions in the stack that are adapted, ascending; empty if it is not stacked.
      names: Hugging Face names of the adapted modules.
      ranks: rank of each.
      scalings: factor of each adapter's output: alpha / r, or alpha / sqrt(r).
      is_embedding: whether the module looks rows up instead of multiplying.
      kind: name of the kind of its adapters, see `kinds.KINDS`.
      variant: which form of the kind, for kinds that have several; see the kind.
    """

    layers: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    scalings: tuple[float, ...]
    is_embedding: bool = False
    kind: str = "lora"
    variant: str = ""

    @property
    def r(self) -> int:
        """The rank that is stored; layers of a smaller one have zeros in the rest."""
        return max(self.ranks)


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """Everything that is trained beside a frozen base.

    Attributes:
      targets: the adapters by module path.
      full: paths of the leaves that are trained whole: `modules_to_save` and biases.
      token_ids: the rows of the embedding that are trained.
    """

    targets: Mapping[str, Target] = dataclasses.field(default_factory=dict)
    full: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


def is_trained(path: str, adaptation: Adaptation | None) -> bool:
    """Whether the model's own leaf at `path` is trained; see `split_trained`."""
    return adaptation is None or path in adaptation.full


class Parts(NamedTuple):
    """Leaves by path: those that are trained whole, and those that stay frozen."""

    trained: dict[str, Any]
    frozen: dict[str, Any]


def split_trained(flat: Mapping[str, Any], adaptation: Adaptation | None) -> Parts:
    """Tells the weights that are trained whole from those that are frozen, in the order of `flat`.

    Args:
      flat: the model's own leaves by path: declarations, specs or arrays, without adapters.
      adaptation: what is trained beside the base; None if every weight is trained.
    """
    trained = {p: leaf for p, leaf in flat.items() if is_trained(p, adaptation)}
    return Parts(trained, {path: leaf for path, leaf in flat.items() if path not in trained})


def matches(pattern: str | Sequence[str], name: str) -> bool:
    """PEFT's rule: a string is a regex for the full name, a list holds names or dotted suffixes."""
    if isinstance(pattern, str):
        return re.fullmatch(pattern, name) is not None
    return any(name == entry or name.endswith(f".{entry}") for entry in pattern)


def parameter_name(module: str) -> str:
    """PEFT's name of the parameter that holds the weight of a module.

    `model.layers.7.mlp.experts.up_proj` -> `model.layers.7.mlp.experts.gate_up_proj`; for all but
    matrices of experts it is the module's name and `.weight`.
    """
    around, _, name = module.rpartition(".")
    if around.rpartition(".")[2] != "experts":
        return f"{module}.weight"
    joined = next((joined for joined, names in JOINED.items() if name in names), name)
    return f"{around}.{joined}"


def older_names(module: str) -> tuple[str, ...]:
    """Names of a module before version 5 of transformers; of a matrix of experts, expert 0's."""
    around, _, matrix = module.rpartition(".")
    if around.endswith(".mlp.experts"):
        outer = around.removesuffix(".mlp.experts")
        short = next((old for old, name in OLDER_MATRICES.items() if name == matrix), matrix)
        return f"{around}.0.{matrix}", f"{outer}.block_sparse_moe.experts.0.{short}"
    renamed = module.replace(".mlp.", ".block_sparse_moe.")
    return (renamed,) if renamed != module else ()


def newer_name(module: str) -> str:
    """The name since version 5 of transformers of a module that is no expert."""
    return module.replace("block_sparse_moe", "mlp")


def pattern_key(patterns: Iterable[str], name: str) -> str | None:
    """PEFT's lookup in `rank_pattern` and `alpha_pattern`: the first key that matches counts."""
    return next(
        (key for key in patterns if re.match(schema.MODULE_PATTERN.format(key), name)), None
    )


def pattern_value(pattern: Mapping[str, float], name: str, default: float) -> float:
    """The value for the module called `name`."""
    key = pattern_key(pattern, name)
    return default if key is None else pattern[key]


def scaling(lora_alpha: float, r: int, *, use_rslora: bool) -> float:
    """`alpha / r` (Hu et al. 2021), or `alpha / sqrt(r)` (Kalajdzievski 2023)."""
    return lora_alpha / (math.sqrt(r) if use_rslora else r)


def layer_number(name: str) -> int | None:
    """The number of the layer in a name; PEFT reads the first one that stands between dots."""
    found = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    return int(found[1]) if found else None
