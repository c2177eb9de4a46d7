"""Folds adapters into their base and writes a whole model.

    python -m purelora.merge --adapter=runs/qlora --output=merged
    python -m purelora.merge --adapter=A --weight=0.7 --adapter=B --weight=0.3 --output=model.gguf
    python -m purelora.merge --adapter=runs/qlora --onto=dequantised --qtype=int8 --output=merged

--adapter=PATH     a run, one of its steps, a PEFT folder or (with --model) a MaxText checkpoint;
                   may be given several times
--weight=NUMBER    how much of the update of each adapter; one for each, or none at all for 1
--output=PATH      a new folder (Hugging Face safetensors), or a new file that ends in .gguf
--model=PATH       the base; by default the one that the first adapter names
--hf-folder=PATH   for a base that is a MaxText checkpoint: the folder of config.json and tokenizer
--onto=NAME        `original` weights (default), or `dequantised`: as the run saw them
--qtype=TYPE       how that base was quantised (int8, int4, nf4 or fp8); by default as the run says
--tile-size=N      goes with --qtype, as quant.tile_size; without it, one scale per output channel
--skip=PATTERN     goes with --qtype, as quant.skip: weights that stay as they are; may be given
                   several times. By default embed_tokens, as in training; `--skip=` for none
--dtype=NAME       float32, bfloat16 or float16; for GGUF also q8_0. By default that of the base
--shard-bytes=N    largest safetensors file (5e9)

One tensor is in memory at a time. For every module the command reports how much of the update is
left in the written dtype; what rounds away is not in the model.
"""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from purelora.checkpoint import store
from purelora.config import command_line, schema
from purelora.core import errors
from purelora.formats import atomic_output
from purelora.interop import merge, open_model
from purelora.interop.peft import adapter_sources
from purelora.interop.peft import files as peft_files
from purelora.weights import hf_write


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    output: str
    adapter: tuple[str, ...] = ()
    weight: tuple[str, ...] = ()
    model: str | None = None
    hf_folder: str | None = None
    onto: Literal["original", "dequantised"] = "original"
    qtype: Literal["int8", "int4", "nf4", "fp8"] | None = None
    tile_size: int | None = None
    skip: tuple[str, ...] | None = None
    dtype: Literal["float32", "bfloat16", "float16", "q8_0"] | None = None
    shard_bytes: int | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether a GGUF file is written, rather than a folder."""
        return merge.is_gguf(self.output)

    @property
    def skipped(self) -> tuple[str, ...]:
        """The patterns of the weights that the arguments leave unquantised."""
        return command_line.QUANT_SKIP if self.skip is None else tuple(p for p in self.skip if p)

    def problems(self) -> Iterator[errors.Problem]:
        """Values out of range, and arguments that do not go together or have no effect."""
        if not self.adapter and self.model is None:
            remedy = "give --adapter, or --model alone to write a run that trains all weights"
            yield errors.Problem("--adapter, --model", None, "are both missing", remedy)
        if self.weight and len(self.weight) != len(self.adapter):
            what = f"is given {len(self.weight)} times for {len(self.adapter)} adapters"
            yield errors.Problem("--weight", list(self.weight), what, "give one for each, or none")
        if self.dtype == "q8_0" and not self.is_gguf:
            yield errors.Problem("--dtype", "q8_0", "is a type of GGUF only", "write a .gguf file")
        if self.shard_bytes is not None and self.is_gguf:
            what = "has no effect on a .gguf file, which is never split"
            yield errors.Problem("--shard-bytes", self.shard_bytes, what, "leave it out")
        elif self.shard_bytes is not None and self.shard_bytes < 1:
            yield errors.Problem("--shard-bytes", self.shard_bytes, "must be at least 1", "")
        yield from self._quant_problems()

    def _quant_problems(self) -> Iterator[errors.Problem]:
        if self.onto == "dequantised" and self.qtype is None and len(self.adapter) != 1:
            what = "is missing: there is not one run that says how its base was quantised"
            yield errors.Problem("--qtype", None, what, "set it, or use --onto=original")
        quant_options = {"qtype": self.qtype, "tile-size": self.tile_size, "skip": self.skip}
        for name, value in quant_options.items():
            if value is None:
                continue
            if self.onto == "original":
                what, remedy = "has no effect with --onto=original", "set --onto=dequantised"
                yield errors.Problem(f"--{name}", value, what, f"{remedy}, or leave it out")
            elif self.qtype is None:
                what = "has no effect without --qtype: the run says how its base was quantised"
                yield errors.Problem(f"--{name}", value, what, "set --qtype, or leave it out")
        if self.tile_size is not None and self.tile_size < 1:
            yield errors.Problem("--tile-size", self.tile_size, "must be at least 1", "")
        for pattern in self.skipped:
            try:
                re.compile(f"(?:{pattern})")
            except re.error as error:
                what = f"is not a regular expression: {error}"
                yield errors.Problem("--skip", pattern, what, "")


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options = command_line.options(Options, argv)
    weights = _checked(options)
    atomic_output.check_free(options.output)
    # Without --model the first adapter names the base.
    path = _base_path(options.adapter[0]) if options.model is None else options.model
    base = open_model.open_model(path, hf_folder=options.hf_folder)
    # Only the base says how the experts lie in an adapter of PEFT's.
    adapters = [
        adapter_sources.open_adapter(adapter, base.source.config) for adapter in options.adapter
    ]
    quantisation = _quantisation(options) if options.onto == "dequantised" else None
    # Errors name what says how the base was quantised: the options, or the run.
    named = command_line.quant_options() if options.qtype is not None else contextlib.nullcontext()
    with named:
        survivals = merge.merge(
            base,
            adapters,
            options.output,
            weights=weights,
            quantisation=quantisation,
            dtype=options.dtype,
            shard_bytes=options.shard_bytes or hf_write.SHARD_BYTES,
            say=_say,
        )
    _say(merge.describe(survivals))
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _checked(options: Options) -> list[float]:
    """The weights of the adapters. Raises ConfigError for all that is wrong with the arguments."""
    problems = list(options.problems())
    weights = [1.0] * len(options.adapter)
    with errors.collected(problems):
        weights = command_line.numbers("--weight", options.weight) or weights
    if problems:
        raise errors.ConfigError.of(problems)
    return weights


def _base_path(adapter: str) -> str:
    path = adapter_sources.open_adapter(adapter).config.base_model_name_or_path
    if path is None:
        raise errors.ConfigError("--model", None, "is missing: the adapter names no base", "set it")
    return path


def _quantisation(options: Options) -> schema.QuantConfig:
    """How the base was quantised: as the arguments say, or as the run that made the adapter."""
    if options.qtype is not None:
        return schema.QuantConfig(options.qtype, options.tile_size, options.skipped)
    folder = pathlib.Path(options.adapter[0])
    if (folder / peft_files.CONFIG).exists():
        what = "is missing: a PEFT folder does not say how its base was quantised"
        raise errors.ConfigError("--qtype", None, what, "set it, or use --onto=original")
    checkpoints, step = store.find(folder)
    settings = checkpoints.meta(step)["config"]
    if settings["lora.init_lora_weights"] in schema.FACTORED_INITS:
        what = "has no base to go onto: the run took its initial adapters out of it"
        raise errors.ConfigError("--onto", options.onto, what, "use --onto=original")
    if settings["quant.qtype"] == "none":
        what = "asks for a quantised base, and the run had a float one"
        raise errors.ConfigError("--onto", options.onto, what, "use --onto=original")
    return schema.QuantConfig(
        settings["quant.qtype"], settings["quant.tile_size"], tuple(settings["quant.skip"])
    )
