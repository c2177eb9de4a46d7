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
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import qwix

from purelora.checkpoint import store
from purelora.config import command_line
from purelora.config import schema as config
from purelora.core import errors, trees
from purelora.formats import atomic_output as output
from purelora.formats import safetensors_file, source
from purelora.interop import builtin, open_model
from purelora.interop.gguf import read as gguf_read
from purelora.interop.gguf import tokenizer as gguf_tokenizer
from purelora.interop.gguf import write as gguf_write
from purelora.interop.maxtext import read as maxtext_read
from purelora.interop.peft import adapter_sources, algebra, artefact, attach
from purelora.interop.peft import files as peft_files
from purelora.lora import targets
from purelora.models import causal_lm, hf_layout, hf_multimodal
from purelora.ops import quant
from purelora.sharding import specs
from purelora.weights import hf_folder as hf
from purelora.weights import hf_write

_FLOATS = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_GGUF_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "q8_0": "q8_0"}
REPORT = "merge_report.json"
_HEAD = f"{targets.HEAD}.weight"


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
        return self.output.endswith(".gguf")

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
        given = {"qtype": self.qtype, "tile-size": self.tile_size, "skip": self.skip}
        for name, value in given.items():
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


class Survival(NamedTuple):
    """How much of a module's update is left in the written weight.

    Attributes:
      module: Hugging Face name.
      update: norm of the update over the norm of the weight.
      kept: component of the written change along the update, 1 if nothing is lost.
      error: norm of (written change - update) over that of the update, 0 if nothing is lost.
    """

    module: str
    update: float
    kept: float
    error: float


# part of a tensor, base's values -> base's values as training saw them
Base = Callable[[hf_layout.Part, np.ndarray], np.ndarray]
Weighted = tuple[artefact.Adapter, float]


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options = command_line.options(Options, argv)
    weights = _checked(options)
    output.check_free(options.output)
    opened, adapters = _opened(options)
    model = causal_lm.from_hf(opened.source.config, opened.source.path, dtype="float32")
    base = _dequantised(options, model) if options.onto == "dequantised" else _as_is
    placed: list[Weighted] = []
    for adapter, weight in zip(adapters, weights, strict=True):
        attached = attach.attach(adapter, model, base_fingerprint=None)
        for note in attached.notes:
            print(f"{adapter.path}: {note}", flush=True)
        check_copies(opened.source, attached)
        placed.append((attached.placed, weight))
    check_fingerprints(opened.source, model, adapters)
    form = output_form(options, opened.source.config)
    merged = Merged(opened.source, model, placed, base, form)
    if merged.left_out:
        print(
            f"{len(merged.left_out)} tensors beside the text model are kept as they are", flush=True
        )
    write(options, opened, merged, form)
    print(describe(merged.survivals), flush=True)
    return 0


def _checked(options: Options) -> list[float]:
    """The weights of the adapters. Raises ConfigError for all that is wrong with the arguments."""
    problems = list(options.problems())
    weights = [1.0] * len(options.adapter)
    with errors.collected(problems):
        weights = command_line.numbers("--weight", options.weight) or weights
    if problems:
        raise errors.ConfigError.of(problems)
    return weights


def _opened(options: Options) -> tuple[builtin.Model, list[artefact.Adapter]]:
    """Opens the base and the adapters; without `--model` the first adapter names the base."""
    path = _base_path(options.adapter[0]) if options.model is None else options.model
    opened = open_model.open_model(path, hf_folder=options.hf_folder)
    # Only the base says how the experts lie in an adapter of PEFT's.
    base = opened.source.config
    return opened, [adapter_sources.open_adapter(adapter, base) for adapter in options.adapter]


def _base_path(adapter: str) -> str:
    path = adapter_sources.open_adapter(adapter).config.base_model_name_or_path
    if path is None:
        raise errors.ConfigError("--model", None, "is missing: the adapter names no base", "set it")
    return path


def check_copies(base: source.Source, attached: attach.Attached) -> None:
    """Raises ModelError if an adapter holds copies of the base's weights that differ from them."""
    own, layout = {}, attached.model.layout_of(base.shapes())
    for path in attached.base_weights:
        part = layout.parts[path][0]
        values = base.read(part.tensor).array.astype(np.float32)
        own[path] = jnp.asarray(values.T if part.is_transposed else values)
    attach.check_copies(attached, trees.unflatten(own))


def check_fingerprints(
    base: source.Source, model: causal_lm.CausalLM, adapters: Sequence[artefact.Adapter]
) -> None:
    """Raises ModelError if an adapter says that it was trained on another base.

    Reads every tensor once if an adapter says on which.
    """
    stated = [adapter for adapter in adapters if adapter.base_fingerprint is not None]
    if stated:
        fingerprint = source.identify(base, model.layout_of(base.shapes()).shapes)
        for adapter in stated:
            attach.check_base(adapter, fingerprint)


class Form(NamedTuple):
    """How values are written.

    Attributes:
      dtype: what the tensors are handed over in; the GGUF writer rounds for itself.
      element_type: GGUF's name of the type of its matrices; None for a safetensors folder.
    """

    dtype: np.dtype[Any]
    element_type: str | None

    def cast(self, name: str, values: np.ndarray) -> np.ndarray:
        """The values as they are handed over. Raises ModelError if the dtype cannot hold them."""
        with np.errstate(over="ignore"):
            cast = values.astype(self.dtype)
        if not np.isfinite(cast.astype(np.float32)).all():
            what = f"has values that {self.dtype.name} cannot hold"
            raise errors.ModelError(name, None, what, "use --dtype=bfloat16 or float32")
        return cast

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """The values that the written file gives back, float64."""
        if self.element_type is not None:
            return gguf_write.rounded(values, self.element_type).astype(np.float64)
        return values.astype(self.dtype).astype(np.float64)


def output_form(options: Options, hf_config: Mapping[str, Any]) -> Form:
    """The form that was asked for; by default the dtype of the base."""
    stated = hf_config.get("dtype", hf_config.get("torch_dtype"))
    dtype = options.dtype or (stated if stated in _FLOATS else "float32")
    if options.is_gguf:
        return Form(_FLOATS["float32"], _GGUF_NAMES[dtype])
    return Form(_FLOATS[dtype], None)


def _as_is(part: hf_layout.Part, values: np.ndarray) -> np.ndarray:
    del part
    return values


def _dequantised(options: Options, model: causal_lm.CausalLM) -> Base:
    """The base that training saw: quantised and dequantised again."""
    flat = trees.flatten(_quantised_infos(options, model))
    rounded = jax.jit(
        lambda values, like: quant.dequantise(quant.quantise(values, like)), static_argnums=1
    )

    def base(part: hf_layout.Part, values: np.ndarray) -> np.ndarray:
        like = flat[part.leaf]
        if not isinstance(like, qwix.QArray):
            return values
        kernel = values.T if part.is_transposed else values
        result = np.asarray(rounded(kernel, like))
        return result.T if part.is_transposed else result

    return base


def _quantised_infos(options: Options, model: causal_lm.CausalLM) -> trees.Tree:
    """Declarations of the quantised base; errors name what says how it was quantised."""
    q = _quantisation(options)
    with command_line.quant_options() if options.qtype is not None else contextlib.nullcontext():
        quant.check_skip([p for p, leaf in model.flat_infos.items() if leaf.is_matrix], q.skip)
        if q.tile_size is not None:
            specs.check_tiles(model.infos, q.tile_size, q.skip)
        return quant.quantised_infos(model.infos, qtype=q.qtype, tile_size=q.tile_size, skip=q.skip)


def _quantisation(options: Options) -> config.QuantConfig:
    """How the base was quantised: as the arguments say, or as the run that made the adapter."""
    if options.qtype is not None:
        return config.QuantConfig(options.qtype, options.tile_size, options.skipped)
    folder = pathlib.Path(options.adapter[0])
    if (folder / peft_files.CONFIG).exists():
        what = "is missing: a PEFT folder does not say how its base was quantised"
        raise errors.ConfigError("--qtype", None, what, "set it, or use --onto=original")
    checkpoints, step = store.find(folder)
    saved = checkpoints.meta(step)["config"]
    if saved["lora.init_lora_weights"] in config.FACTORED_INITS:
        what = "has no base to go onto: the run took its initial adapters out of it"
        raise errors.ConfigError("--onto", options.onto, what, "use --onto=original")
    if saved["quant.qtype"] == "none":
        what = "asks for a quantised base, and the run had a float one"
        raise errors.ConfigError("--onto", options.onto, what, "use --onto=original")
    return config.QuantConfig(
        saved["quant.qtype"], saved["quant.tile_size"], tuple(saved["quant.skip"])
    )


class Merged:
    """The tensors of the merged model, made one at a time; keeps what it saw of each update."""

    def __init__(
        self,
        base_source: source.Source,
        model: causal_lm.CausalLM,
        adapters: Sequence[Weighted],
        base: Base,
        form: Form,
    ):
        """Takes adapters under the base's own names."""
        self._source = base_source
        self._model = model
        self._adapters = adapters
        self._base = base
        self._form = form
        self._layout = model.layout_of(base_source.shapes())
        self._changes: dict[str, _Change] = {}

    @property
    def survivals(self) -> list[Survival]:
        """What is left of the update of every module that has been made so far."""
        return [change.survival(module) for module, change in self._changes.items()]

    @property
    def is_untied(self) -> bool:
        """Whether table and head of a tied base come out different."""
        names = [self._model.modules[p].names[0] for p in (targets.EMBEDDING, targets.HEAD)]
        linear = {"lora_A", "lora_embedding_A"}
        return self._model.is_tied and any(
            linear & adapter.modules.get(name, {}).keys()
            for adapter, _ in self._adapters
            for name in names
        )

    def config(self) -> dict[str, Any]:
        """The base's config.json, untied where it has to be."""
        config = dict(self._source.config)
        if self.is_untied:
            config["tie_word_embeddings"] = False
            if "text_config" in config:
                config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
        return config

    def tensors(self) -> dict[str, safetensors_file.Spec]:
        """All tensors by the base's own names, each made when it is asked for."""
        table = self._layout.parts[f"{targets.EMBEDDING}.weight"][0].tensor
        sources = {name: name for name in self._layout.shapes}
        if self.is_untied:
            sources[hf_multimodal.beside(_HEAD, table)] = table
        shapes = self._source.shapes()
        made = {
            name: safetensors_file.Spec(
                self._form.dtype, tuple(shapes[own]), self._loader(name, own)
            )
            for name, own in sources.items()
        }
        return made | {name: self._untouched(name) for name in self.left_out}

    @property
    def left_out(self) -> list[str]:
        """The base's tensors that the text model does not use; they are copied unchanged."""
        return self._model.left_out(self._source.shapes())

    def _untouched(self, name: str) -> safetensors_file.Spec:
        stored = self._source.read(name).array
        return safetensors_file.Spec(
            stored.dtype, stored.shape, lambda: self._source.read(name).array
        )

    def _loader(self, name: str, own: str) -> Callable[[], np.ndarray]:
        def load() -> np.ndarray:
            stored = self._source.read(own).array
            written = np.empty(stored.shape, self._form.dtype)
            for part in self._layout.contents[own]:
                values = stored[part.box].astype(np.float32)
                # A box has all dimensions of its tensor, that of the experts too.
                kernel = self._base(part, values.reshape(part.shape))
                called = part.name if name == own else _HEAD
                # Adapters are of matrices `[out, in]`.
                is_swapped = self._model.flat_infos[part.leaf].is_transposed != part.is_transposed
                made = self._merged(called, part.expert, kernel.T if is_swapped else kernel)
                written[part.box] = (made.T if is_swapped else made).reshape(values.shape)
            return written

        return load

    def _merged(self, name: str, expert: int | None, base: np.ndarray) -> np.ndarray:
        """The merged values of a part whose base values are given, `[out, in]` for a matrix.

        Args:
          name: Hugging Face name of its layer of a leaf, see `storage.Part.name`.
          expert: the number of the expert, if it is one.
          base: the base's values.
        """
        module, _, kind = name.rpartition(".")
        having = [(a, w) for a, w in self._adapters if module in a.modules]
        if not having:
            return self._form.cast(name, base)
        if len(having) == 1 and having[0][1] == 1:  # Exactly the adapter's own whole weights.
            result = algebra.updated(having[0][0], module, kind, base, expert=expert)
        else:
            updates = [
                w * (algebra.updated(a, module, kind, base, expert=expert) - base)
                for a, w in having
            ]
            result = base + np.sum(np.stack(updates), axis=0, dtype=np.float32)
        written = self._form.cast(name, result)
        if kind == "weight":
            self._changes.setdefault(module, _Change()).add(base, result, self._form)
        return written


@dataclasses.dataclass
class _Change:
    """How much of a module's update survives rounding, summed up over its experts if it has any.

    Attributes:
      update: squared norm of the exact update.
      whole: squared norm of the base's weight.
      error: squared norm of the written change less the exact update.
      along: scalar product of the written change and the exact update.
    """

    update: float = 0.0
    whole: float = 0.0
    error: float = 0.0
    along: float = 0.0

    def add(self, base: np.ndarray, result: np.ndarray, form: Form) -> None:
        update = (result - base).astype(np.float64)
        change = form.rounded(result) - form.rounded(base)
        self.update += float(np.vdot(update, update))
        self.whole += float(np.vdot(base, base))
        self.error += float(np.vdot(change - update, change - update))
        self.along += float(np.vdot(change, update))

    def survival(self, module: str) -> Survival:
        if self.update == 0:
            return Survival(module, 0.0, 1.0, 0.0)
        size = math.sqrt(self.update / max(self.whole, 1e-60))
        error = math.sqrt(self.error / self.update)
        return Survival(module, size, self.along / self.update, error)


def write(options: Options, opened: builtin.Model, merged: Merged, form: Form) -> None:
    """Writes the model, and for a folder the report beside it.

    Raises:
      ModelError: the output is taken or cannot be written, or a value does not fit the dtype.
    """
    if form.element_type is not None:
        gguf_write.write_file(
            options.output,
            merged.config(),
            merged.tensors(),
            tokenizer_fields=_tokenizer_fields(options.output, opened),
            element_type=form.element_type,
        )
        return
    source = opened.source
    if isinstance(source, hf.HFSource):
        companions = hf_write.folder_files(source.path)
    elif isinstance(source, maxtext_read.MaxTextSource):
        companions = hf_write.folder_files(source.hf_folder)
    else:
        companions = hf_write.tokenizer_files(opened.tokenizer)
    hf_write.write_folder(
        options.output,
        merged.config(),
        merged.tensors(),
        companions=companions,
        shard_bytes=options.shard_bytes or hf_write.SHARD_BYTES,
    )
    rows = [survival._asdict() for survival in merged.survivals]
    report = pathlib.Path(options.output) / REPORT
    report.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _tokenizer_fields(path: str, opened: builtin.Model) -> Mapping[str, Any]:
    if isinstance(opened.source, gguf_read.GGUFSource):
        return gguf_tokenizer.copied(opened.source.container)
    rows = opened.source.config["vocab_size"]
    return gguf_tokenizer.made(path, opened.tokenizer, rows)


def describe(survivals: Sequence[Survival]) -> str:
    """The report for people: every module, and what was lost on the whole."""
    if not survivals:
        return "no weight was changed"
    width = max(len(s.module) for s in survivals)
    lines = [f"{'module':<{width}}  update/weight  kept     error"]
    lines += [
        f"{s.module:<{width}}  {s.update:<13.2e}  {s.kept:<7.2%}  {s.error:.2%}" for s in survivals
    ]
    lost = [s for s in survivals if s.error > 0.5]
    if lost:
        lines.append(
            f"in {len(lost)} of {len(survivals)} modules more than half of the update is rounding: "
            "write a wider dtype"
        )
    return "\n".join(lines)
