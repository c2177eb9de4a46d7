"""A model and its adapters, loaded to generate text: what `generate` and `chat` share.

The base is loaded once; every adapter is a small tree beside it.
"""

import dataclasses
import datetime
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from purelora.config import checks, command_line
from purelora.core import errors, trees
from purelora.data import chat
from purelora.interop import open_model
from purelora.interop.peft import adapter_sources, attach
from purelora.lora import targets
from purelora.models import causal_lm, sampling
from purelora.ops import quant
from purelora.sharding import specs
from purelora.training import setup
from purelora.weights import load as weights_load
from purelora.weights import tokenizer as tokenizers

BASE = "base"  # The name of the model without an adapter.
Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Arguments of both commands, see `generate`."""

    model: str
    hf_folder: str | None = None
    adapter: tuple[str, ...] = ()
    system: str | None = None
    chat_template_kwargs: Mapping[str, bool | int | str] = dataclasses.field(default_factory=dict)
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    qtype: Literal["none", "int8", "int4", "nf4", "fp8"] = "none"
    tile_size: int | None = None

    @property
    def sampling(self) -> sampling.Sampling:
        return sampling.Sampling(self.temperature, self.top_k, self.top_p)

    def problems(self) -> Iterator[errors.Problem]:
        """Values out of range, and values that would be ignored."""
        for name, value, least in (
            ("--max-new-tokens", self.max_new_tokens, 1),
            ("--top-k", self.top_k, 1),
            ("--tile-size", self.tile_size, 1),
            ("--seed", self.seed, 0),
        ):
            if value is not None and not least <= value < 2**31:
                yield errors.Problem(name, value, f"must be from {least} to {2**31 - 1}", "")
        found = checks.template_problems("--chat-template-kwargs", self.chat_template_kwargs)
        yield from (errors.Problem(*problem) for problem in found)
        if not 0 <= self.temperature < float("inf"):
            what = "must be a number of at least 0"
            yield errors.Problem("--temperature", self.temperature, what, "0 is greedy")
        if not 0 < self.top_p <= 1:
            what = "must be above 0 and at most 1"
            yield errors.Problem("--top-p", self.top_p, what, "1 leaves it out")
        if self.temperature == 0:
            what = "has no effect with --temperature=0, which is greedy"
            remedy = "set a temperature, or leave it out"
            if self.top_k is not None:
                yield errors.Problem("--top-k", self.top_k, what, remedy)
            if self.top_p != 1:
                yield errors.Problem("--top-p", self.top_p, what, remedy)
        if self.qtype == "none" and self.tile_size is not None:
            what, remedy = "has no effect with --qtype=none", "set --qtype, or leave it out"
            yield errors.Problem("--tile-size", self.tile_size, what, remedy)


def check(problems: Sequence[errors.Problem]) -> None:
    """Raises ConfigError if there are any."""
    if problems:
        raise errors.ConfigError.of(problems)


class Variant(NamedTuple):
    """The model with one adapter, or with none.

    Attributes:
      model: the declarations, with the adapter's targets.
      base: the frozen weights, without those that the adapter replaces.
      trainable: the leaves of the adapter; empty for none.
    """

    model: causal_lm.CausalLM
    base: trees.Tree
    trainable: trees.Tree


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model.

    Attributes:
      tokenizer: the tokenizer that came with the weights.
      template: the chat template; None if the tokenizer has none.
      variants: the model without an adapter (`base`) and with each of them, by name.
      dtype: dtype of the computation.
      longest: the largest number of positions that the model was made for; None if not stated.
    """

    tokenizer: tokenizers.Tokenizer
    template: chat.ChatTemplate | None
    variants: Mapping[str, Variant]
    dtype: Any
    longest: int | None

    def variant(self, name: str) -> Variant:
        """Raises ConfigError, with near names, if there is none of this name."""
        if name not in self.variants:
            raise unknown_name("--use", name, list(self.variants))
        return self.variants[name]

    def ids(self, prompt: str | Sequence[Message], *, where: str, max_new_tokens: int) -> list[int]:
        """The tokens of plain text, or of messages with the beginning of an answer.

        Args:
          prompt: plain text, or messages.
          where: what names the prompt in an error.
          max_new_tokens: how many more there must be room for.

        Raises:
          ConfigError, DataError: there is no template, it fails, or the tokens are none or too
            many.
        """
        text = prompt if isinstance(prompt, str) else self._rendered(prompt, where)
        # As for the training data: the tokenizer adds a BOS unless the text begins with one.
        ids = [int(i) for i in self.tokenizer.encode(text, add_special_tokens=True).ids]
        if not ids:
            raise errors.DataError(where, text, "has no token", "remove it")
        if self.longest is not None and len(ids) + max_new_tokens > self.longest:
            what = f"has {len(ids)} tokens; with {max_new_tokens} more that is beyond the model's "
            remedy = "shorten it, or set a smaller --max-new-tokens"
            raise errors.DataError(where, None, what + f"{self.longest} positions", remedy)
        return ids

    def _rendered(self, messages: Sequence[Message], where: str) -> str:
        if self.template is None:
            what, remedy = "the model has no chat template", "give plain text, with --raw"
            raise errors.DataError(where, None, what, remedy)
        return self.template.render(messages, tools=None, add_generation_prompt=True, where=where)


def unknown_name(where: str, name: str, known: Sequence[str]) -> errors.ConfigError:
    """The error for a name that is neither `base` nor that of an adapter."""
    return errors.ConfigError(where, name, "is no adapter", errors.nearest(name, known))


def adapter_paths(arguments: Sequence[str]) -> dict[str, str]:
    """Adapters' paths by name, from `NAME=PATH` or from `PATH`, whose last part is the name.

    Raises:
      ConfigError: an empty name or path, or a name that is taken.
    """
    paths: dict[str, str] = {}
    problems = []
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not equals or "/" in name:
            name, path = argument.rstrip("/").rpartition("/")[2], argument
        if not name or not path:
            problems.append(errors.Problem("--adapter", argument, "is not NAME=PATH or PATH", ""))
        elif name in paths or name == BASE:
            what, remedy = f"is a second {name!r}", "give it another name: --adapter=NAME=PATH"
            problems.append(errors.Problem("--adapter", argument, what, remedy))
        else:
            paths[name] = path
    check(problems)
    return paths


def load_model(options: ModelOptions, paths: Mapping[str, str]) -> LoadedModel:
    """Opens the model and the adapters at `paths`, and reads the weights onto one device.

    Raises:
      ConfigError, ModelError, CheckpointError: a model, tile size or adapter that cannot be used.
    """
    opened = open_model.open_model(
        options.model, hf_folder=options.hf_folder, progress=setup.fetch_progress(say)
    )
    config = opened.source.config
    model = causal_lm.from_hf(config, opened.source.path, dtype=options.dtype)
    infos = _infos(model, options)
    # Everything that can be wrong with the adapters is found before the weights are read.
    adapters = {name: adapter_sources.open_adapter(path, config) for name, path in paths.items()}
    attached = {n: attach.attach(a, model, base_fingerprint=None) for n, a in adapters.items()}
    mesh = specs.make_mesh(1, 1, jax.devices()[:1])
    placed = specs.shardings(specs.spec_tree(infos, mesh), mesh)
    loaded = weights_load.load(opened.source, model, infos, placed)
    variants = {BASE: Variant(model, loaded.tree, {})}
    for name, one in attached.items():
        attach.check_base(adapters[name], loaded.fingerprint)
        attach.check_copies(one, loaded.tree)
        for note in one.notes:
            say(f"{name}: {note}")
        trainable = jax.device_put(one.trainable, specs.replicated(mesh))
        parts = targets.split_trained(trees.flatten(loaded.tree), one.model.adaptation)
        variants[name] = Variant(one.model, trees.unflatten(parts.frozen), trainable)
    return LoadedModel(
        tokenizer=opened.tokenizer,
        template=_template(opened.tokenizer, options.chat_template_kwargs),
        variants=variants,
        dtype=jnp.dtype(options.dtype),
        longest=model.config.max_position_embeddings,
    )


def say(text: str) -> None:
    """Prints a line beside the answers."""
    print(text, file=sys.stderr, flush=True)


def _infos(model: causal_lm.CausalLM, options: ModelOptions) -> trees.Tree:
    """Declarations of the base; errors name the arguments, not the keys of a config."""
    with command_line.quant_options():
        if options.qtype != "none" and options.tile_size is not None:
            specs.check_tiles(model.infos, options.tile_size, command_line.QUANT_SKIP)
        return quant.quantised_infos(
            model.infos,
            qtype=options.qtype,
            tile_size=options.tile_size,
            skip=command_line.QUANT_SKIP,
        )


def _template(
    tokenizer: tokenizers.Tokenizer, options: Mapping[str, bool | int | str]
) -> chat.ChatTemplate | None:
    if tokenizer.chat_template is None:
        return None
    return chat.compile_template(
        tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
        options=options,
        now=datetime.datetime.now(),
    )
