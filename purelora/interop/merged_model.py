"""The tensors of a model with adapters merged into its base, made one at a time.

For every module the update that the adapters make is compared with what is left of it in the
written dtype.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from purelora.core import errors
from purelora.core.paths import Path
from purelora.formats import safetensors_file, source
from purelora.interop.gguf import write as gguf_write
from purelora.interop.peft import algebra, artefact
from purelora.lora import kinds, targets
from purelora.models import causal_lm, hf_layout, hf_multimodal

_FLOATS = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "q8_0": "q8_0"}
_HEAD = f"{targets.HEAD}.weight"

# (part of a tensor, the base's values of it) -> the values that the update is added to
BaseValues = Callable[[hf_layout.Part, np.ndarray], np.ndarray]


def original_values(part: hf_layout.Part, values: np.ndarray) -> np.ndarray:
    """The base's values as they are stored."""
    del part
    return values


class OutputForm(NamedTuple):
    """The dtype and file format that merged weights are written in.

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


def output_form(dtype: str | None, hf_config: Mapping[str, Any], *, is_gguf: bool) -> OutputForm:
    """The form of an output in `dtype`, by default that of the base.

    Args:
      dtype: "float32", "bfloat16" or "float16"; for GGUF also "q8_0".
      hf_config: the base's config.json, which states its dtype; float32 if it does not.
      is_gguf: whether a GGUF file is written, rather than a safetensors folder.
    """
    stated = hf_config.get("dtype", hf_config.get("torch_dtype"))
    name = dtype or (stated if stated in _FLOATS else "float32")
    if is_gguf:
        return OutputForm(_FLOATS["float32"], _GGUF_TYPES[name])
    return OutputForm(_FLOATS[name], None)


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


class MergedModel:
    """The tensors and config of a merged model; each tensor is computed when it is loaded."""

    def __init__(
        self,
        base_source: source.Source,
        model: causal_lm.CausalLM,
        adapters: Sequence[tuple[artefact.Adapter, float]],
        base_values: BaseValues,
        form: OutputForm,
    ):
        """Prepares the merge; no weight is read.

        Args:
          base_source: the base's weights.
          model: their declarations.
          adapters: with the weight of each; their modules have the names that the base has.
          base_values: what the updates are added to, for example `original_values`.
          form: how the tensors are written.
        """
        self._source = base_source
        self._model = model
        self._adapters = adapters
        self._base_values = base_values
        self._form = form
        self._layout = model.layout_of(base_source.shapes())
        self._changes: dict[str, _WeightChange] = {}

    @property
    def survivals(self) -> list[Survival]:
        """The survival of the update of every module whose weight has been computed so far."""
        return [change.survival(module) for module, change in self._changes.items()]

    @property
    def is_untied(self) -> bool:
        """Whether embedding and head, tied in the base, get different weights."""
        names = [self._model.modules[p].names[0] for p in (targets.EMBEDDING, targets.HEAD)]
        return self._model.is_tied and any(
            kinds.is_adapted(adapter.modules.get(name, {}))
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

    def tensors(self) -> dict[str, safetensors_file.LazyTensor]:
        """All tensors, by the names of the base's files."""
        table = self._layout.parts[f"{targets.EMBEDDING}.weight"][0].tensor
        base_names = {name: name for name in self._layout.shapes}
        if self.is_untied:
            base_names[hf_multimodal.beside(_HEAD, table)] = table
        shapes = self._source.shapes()
        tensors = {
            name: safetensors_file.LazyTensor(
                self._form.dtype, tuple(shapes[base_name]), self._loader(name, base_name)
            )
            for name, base_name in base_names.items()
        }
        return tensors | {name: self._untouched(name) for name in self.left_out}

    @property
    def left_out(self) -> list[str]:
        """The base's tensors that the text model does not use; they are copied unchanged."""
        return self._model.left_out(self._source.shapes())

    def _untouched(self, name: str) -> safetensors_file.LazyTensor:
        stored = self._source.read(name).array
        return safetensors_file.LazyTensor(
            stored.dtype, stored.shape, lambda: self._source.read(name).array
        )

    def _loader(self, name: str, base_name: str) -> Callable[[], np.ndarray]:
        def load() -> np.ndarray:
            stored = self._source.read(base_name).array
            written = np.empty(stored.shape, self._form.dtype)
            for part in self._layout.contents[base_name]:
                values = stored[part.box].astype(np.float32)
                # A box has all dimensions of its tensor, that of the experts too.
                kernel = self._base_values(part, values.reshape(part.shape))
                hf_name = part.name if name == base_name else _HEAD
                # Adapters are of matrices `[out, in]`.
                is_swapped = self._model.flat_infos[part.leaf].is_transposed != part.is_transposed
                merged = self._merged(hf_name, part.expert, kernel.T if is_swapped else kernel)
                written[part.box] = (merged.T if is_swapped else merged).reshape(values.shape)
            return written

        return load

    def _merged(self, name: str, expert: int | None, base: np.ndarray) -> np.ndarray:
        """The merged values of a part whose base values are given, `[out, in]` for a matrix.

        Args:
          name: Hugging Face name of its layer of a leaf, see `hf_layout.Part.name`.
          expert: the number of the expert, if it is one.
          base: the base's values.
        """
        module, kind = Path(name).parent, Path(name).name
        adapters = [(a, w) for a, w in self._adapters if module in a.modules]
        if not adapters:
            return self._form.cast(name, base)
        if len(adapters) == 1 and adapters[0][1] == 1:  # Exactly the weights it trained whole.
            result = algebra.updated(adapters[0][0], module, kind, base, expert=expert)
        else:
            updates = [
                w * (algebra.updated(a, module, kind, base, expert=expert) - base)
                for a, w in adapters
            ]
            result = base + np.sum(np.stack(updates), axis=0, dtype=np.float32)
        written = self._form.cast(name, result)
        if kind == "weight":
            self._changes.setdefault(module, _WeightChange()).add(base, result, self._form)
        return written


@dataclasses.dataclass
class _WeightChange:
    """The sums from which a module's `Survival` is computed; over all experts of a mixture.

    Attributes:
      update: squared norm of the exact update.
      weight: squared norm of the base's weight.
      error: squared norm of the written change less the exact update.
      along: scalar product of the written change and the exact update.
    """

    update: float = 0.0
    weight: float = 0.0
    error: float = 0.0
    along: float = 0.0

    def add(self, base: np.ndarray, result: np.ndarray, form: OutputForm) -> None:
        update = (result - base).astype(np.float64)
        change = form.rounded(result) - form.rounded(base)
        self.update += float(np.vdot(update, update))
        self.weight += float(np.vdot(base, base))
        self.error += float(np.vdot(change - update, change - update))
        self.along += float(np.vdot(change, update))

    def survival(self, module: str) -> Survival:
        if self.update == 0:
            return Survival(module, 0.0, 1.0, 0.0)
        size = math.sqrt(self.update / max(self.weight, 1e-60))
        error = math.sqrt(self.error / self.update)
        return Survival(module, size, self.along / self.update, error)
