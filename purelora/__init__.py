"""purelora: LoRA and QLoRA fine-tuning of language models in JAX, as a functional core.

`docs/python.md` shows how the functions here go together. They are imported when they are first
asked for: `import purelora` itself takes no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from purelora.core.batch import Batch as Batch
    from purelora.core.param_info import initial_tree as initial_tree
    from purelora.core.train_state import TrainState as TrainState
    from purelora.core.train_state import create as create_state
    from purelora.interop.merge import merge as merge_adapters
    from purelora.interop.open_model import open_model as open_model
    from purelora.interop.peft.adapter_sources import open_adapter as open_adapter
    from purelora.lora.adapters import adapter_infos as adapter_infos
    from purelora.ops.quant import dequantise as dequantise
    from purelora.ops.quant import quantise as quantise
    from purelora.ops.quant import quantised_infos as quantised_infos
    from purelora.sharding.specs import make_mesh as make_mesh
    from purelora.training.adapter_export import export as export_adapter
    from purelora.training.beginning import to_nnx as to_nnx
    from purelora.training.by_hand import complete as complete
    from purelora.training.by_hand import configure as configure
    from purelora.training.by_hand import evaluate as evaluate
    from purelora.training.by_hand import init_state as init_state
    from purelora.training.by_hand import load_weights as load_weights
    from purelora.training.by_hand import make_batches as make_batches
    from purelora.training.by_hand import make_eval as make_eval
    from purelora.training.by_hand import make_step as make_step
    from purelora.training.by_hand import plan_run as plan_run
    from purelora.training.by_hand import save_run as save_run
    from purelora.training.feed import feed as feed
    from purelora.training.nnx_boundary import from_nnx as from_nnx
    from purelora.training.nnx_boundary import merge as merge_nnx
    from purelora.training.plan_report import table as describe
    from purelora.training.programs import replicated_layout as replicated_layout
    from purelora.training.step import make_train_step as make_train_step

__version__ = "0.1.0"

# Where each public name is: a module, and its name there.
_PUBLIC = {
    "Batch": ("core.batch", "Batch"),
    "TrainState": ("core.train_state", "TrainState"),
    "adapter_infos": ("lora.adapters", "adapter_infos"),
    "complete": ("training.by_hand", "complete"),
    "create_state": ("core.train_state", "create"),
    "configure": ("training.by_hand", "configure"),
    "dequantise": ("ops.quant", "dequantise"),
    "describe": ("training.plan_report", "table"),
    "evaluate": ("training.by_hand", "evaluate"),
    "export_adapter": ("training.adapter_export", "export"),
    "feed": ("training.feed", "feed"),
    "from_nnx": ("training.nnx_boundary", "from_nnx"),
    "init_state": ("training.by_hand", "init_state"),
    "initial_tree": ("core.param_info", "initial_tree"),
    "load_weights": ("training.by_hand", "load_weights"),
    "make_batches": ("training.by_hand", "make_batches"),
    "make_eval": ("training.by_hand", "make_eval"),
    "make_mesh": ("sharding.specs", "make_mesh"),
    "make_step": ("training.by_hand", "make_step"),
    "make_train_step": ("training.step", "make_train_step"),
    "merge_adapters": ("interop.merge", "merge"),
    "merge_nnx": ("training.nnx_boundary", "merge"),
    "open_adapter": ("interop.peft.adapter_sources", "open_adapter"),
    "open_model": ("interop.open_model", "open_model"),
    "plan_run": ("training.by_hand", "plan_run"),
    "quantise": ("ops.quant", "quantise"),
    "quantised_infos": ("ops.quant", "quantised_infos"),
    "replicated_layout": ("training.programs", "replicated_layout"),
    "save_run": ("training.by_hand", "save_run"),
    "to_nnx": ("training.beginning", "to_nnx"),
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'purelora' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(importlib.import_module(f"purelora.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
