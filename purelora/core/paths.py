"""Names of parameters and modules: dotted, as `layers.self_attn.q_proj.weight`."""

from collections.abc import Iterable


class Path(str):
    """A dotted name that knows its parts; equal to the plain string, and a key as good.

    >>> weight = Path("layers.self_attn.q_proj.weight")
    >>> weight.parent, weight.name, weight.parent / "lora_a"
    ('layers.self_attn.q_proj', 'weight', 'layers.self_attn.q_proj.lora_a')
    """

    __slots__ = ()

    @classmethod
    def of(cls, parts: Iterable[str]) -> "Path":
        """The path with these parts; empty parts are left out."""
        return cls(".".join(part for part in parts if part))

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.split("."))

    @property
    def name(self) -> str:
        """The last part: of a leaf `weight`, `bias` or `lora_a`; of a module `q_proj`."""
        return self.rpartition(".")[2]

    @property
    def parent(self) -> "Path":
        """The path without its last part: of a leaf, its module; empty for a single part."""
        return Path(self.rpartition(".")[0])

    @property
    def first(self) -> str:
        return self.partition(".")[0]

    def __truediv__(self, part: str) -> "Path":
        """A path below this one; below the empty path it is `part` itself."""
        return Path(f"{self}.{part}" if self else part)

    def with_name(self, name: str) -> "Path":
        """The same path with another last part."""
        return self.parent / name

    def is_below(self, prefix: str) -> bool:
        """Whether `prefix` is this path or one of the modules above it."""
        return self == prefix or self.startswith(f"{prefix}.")

    def below(self, prefix: str) -> "Path":
        """What follows `prefix` and its dot.

        Raises:
          ValueError: the path does not lie below it.
        """
        if not self.startswith(f"{prefix}."):
            raise ValueError(f"{self} does not lie below {prefix}")
        return Path(self[len(prefix) + 1 :])

    def ends_with(self, suffix: str) -> bool:
        """Whether the last parts are those of `suffix`: whole parts, never the end of one."""
        return self == suffix or self.endswith(f".{suffix}")

    def without(self, name: str) -> "Path":
        """The path without its last part if that is `name`; unchanged otherwise."""
        return self.parent if self.name == name else self
