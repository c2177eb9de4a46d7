"""Merges adapters into their base and writes the model: a Hugging Face folder or a GGUF file.

    base = open_model.open_model("smollm2-135m")
    adapter = adapter_sources.open_adapter("runs/qlora", base.source.config)
    merge.merge(base, [adapter], "merged")

One tensor is in memory at a time.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix

from purelora.config import schema
from purelora.core import trees
from purelora.formats import atomic_output, source
from purelora.interop import builtin, merged_model
from purelora.interop.gguf import read as gguf_read
from purelora.interop.gguf import tokenizer_write
from purelora.interop.gguf import write as gguf_write
from purelora.interop.maxtext import read as maxtext_read
from purelora.interop.peft import artefact, attach
from purelora.models import causal_lm, hf_layout
from purelora.ops import quant
from purelora.sharding import specs
from purelora.weights import hf_folder, hf_write

REPORT = "merge_report.json"


def merge(
    base: builtin.Model,
    adapters: Sequence[artefact.Adapter],
    output: str,
    *,
    weights: Sequence[float] | None = None,
    quantisation: schema.QuantConfig | None = None,
    dtype: str | None = None,
    shard_bytes: int = hf_write.SHARD_BYTES,
    say: Callable[[str], None] = print,
) -> list[merged_model.Survival]:
    """Writes the base with the updates of the adapters added to its weights.

    Args:
      base: the opened base.
      adapters: any number of them; with none, the base is written as it is.
      output: a new folder, or a new file that ends in `.gguf`.
      weights: a factor for the update of each adapter; 1 for all by default.
      quantisation: add the updates to the base as a run with these settings saw it, quantised and
        dequantised; by default to the original weights.
      dtype: "float32", "bfloat16" or "float16", for GGUF also "q8_0"; by default that of the base.
      shard_bytes: largest safetensors file.
      say: is told what an adapter says about itself, and what is copied unchanged.

    Returns:
      For each module that was changed, how much of its update survives in the written dtype.

    Raises:
      ModelError: an adapter does not fit the base, the output is taken or cannot be written, or a
        value does not fit the dtype.
      ConfigError: `quantisation` does not fit the base.
    """
    atomic_output.check_free(output)
    hf_config = base.source.config
    model = causal_lm.from_hf(hf_config, base.source.path, dtype="float32")
    values: merged_model.BaseValues = merged_model.original_values
    if quantisation is not None:
        values = dequantised_values(model, quantisation)
    attached = [_attached(base.source, model, adapter, say) for adapter in adapters]
    check_fingerprints(base.source, model, adapters)
    form = merged_model.output_form(dtype, hf_config, is_gguf=is_gguf(output))
    weighted = list(zip(attached, weights or [1.0] * len(attached), strict=True))
    merged = merged_model.MergedModel(base.source, model, weighted, values, form)
    if merged.left_out:
        say(f"{len(merged.left_out)} tensors beside the text model are kept as they are")
    _write(output, base, merged, form, shard_bytes)
    return merged.survivals


def is_gguf(output: str) -> bool:
    """Whether an output of this name is a GGUF file, rather than a folder."""
    return output.endswith(".gguf")


def dequantised_values(
    model: causal_lm.CausalLM, quantisation: schema.QuantConfig
) -> merged_model.BaseValues:
    """The base's values as training saw them: quantised and dequantised.

    Raises:
      ConfigError: the settings do not fit the model.
    """
    q = quantisation
    quant.check_skip([p for p, leaf in model.flat_infos.items() if leaf.is_matrix], q.skip)
    if q.tile_size is not None:
        specs.check_tiles(model.infos, q.tile_size, q.skip)
    infos = trees.flatten(
        quant.quantised_infos(model.infos, qtype=q.qtype, tile_size=q.tile_size, skip=q.skip)
    )
    rounded = jax.jit(
        lambda values, like: quant.dequantise(quant.quantise(values, like)), static_argnums=1
    )

    def values_of(part: hf_layout.Part, values: np.ndarray) -> np.ndarray:
        like = infos[part.leaf]
        if not isinstance(like, qwix.QArray):
            return values
        kernel = values.T if part.is_transposed else values
        result = np.asarray(rounded(kernel, like))
        return result.T if part.is_transposed else result

    return values_of


def _attached(
    base: source.Source,
    model: causal_lm.CausalLM,
    adapter: artefact.Adapter,
    say: Callable[[str], None],
) -> artefact.Adapter:
    """The adapter with the names of the base's modules. Raises ModelError if it does not fit."""
    attachment = attach.attach(adapter, model, base_fingerprint=None)
    for note in attachment.notes:
        say(f"{adapter.path}: {note}")
    check_copies(base, attachment)
    return attachment.placed


def check_copies(base: source.Source, attached: attach.Attached) -> None:
    """Raises ModelError if an adapter holds copies of the base's weights that differ from them."""
    leaves, layout = {}, attached.model.layout_of(base.shapes())
    for path in attached.base_weights:
        part = layout.parts[path][0]
        values = base.read(part.tensor).array.astype(np.float32)
        leaves[path] = jnp.asarray(values.T if part.is_transposed else values)
    attach.check_copies(attached, trees.unflatten(leaves))


def check_fingerprints(
    base: source.Source, model: causal_lm.CausalLM, adapters: Sequence[artefact.Adapter]
) -> None:
    """Raises ModelError if an adapter says that it was trained on another base.

    Reads every tensor once if any adapter says on which.
    """
    stated = [adapter for adapter in adapters if adapter.base_fingerprint is not None]
    if stated:
        fingerprint = source.identify(base, model.layout_of(base.shapes()).shapes)
        for adapter in stated:
            attach.check_base(adapter, fingerprint)


def _write(
    output: str,
    base: builtin.Model,
    merged: merged_model.MergedModel,
    form: merged_model.OutputForm,
    shard_bytes: int,
) -> None:
    """Writes the model, and into a folder the report too."""
    if form.element_type is not None:
        gguf_write.write_file(
            output,
            merged.config(),
            merged.tensors(),
            tokenizer_fields=_tokenizer_fields(output, base),
            element_type=form.element_type,
        )
        return
    if isinstance(base.source, hf_folder.HFSource):
        companions = hf_write.folder_files(base.source.path)
    elif isinstance(base.source, maxtext_read.MaxTextSource):
        companions = hf_write.folder_files(base.source.hf_folder)
    else:
        companions = hf_write.tokenizer_files(base.tokenizer)
    hf_write.write_folder(
        output,
        merged.config(),
        merged.tensors(),
        companions=companions,
        shard_bytes=shard_bytes,
    )
    rows = [survival._asdict() for survival in merged.survivals]
    report = pathlib.Path(output) / REPORT
    report.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _tokenizer_fields(output: str, base: builtin.Model) -> Mapping[str, Any]:
    if isinstance(base.source, gguf_read.GGUFSource):
        return tokenizer_write.copied_fields(base.source.container)
    return tokenizer_write.fields_of(output, base.tokenizer, base.source.config["vocab_size"])


def describe(survivals: Sequence[merged_model.Survival]) -> str:
    """A table of all changed modules, and what was lost on the whole."""
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
