"""MaxText's trainers for benchmarks/trainers.py, on batches that purelora's run made.

MaxText is imported only when a trainer is asked for.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from common import peers


def maxtext(task: peers.Task, mode: str, scan: bool, batches: Sequence[Any]) -> peers.Way:
    """The step of MaxText's train loop, which pretraining and SFT share."""
    peers.need("maxtext")
    with _quiet():
        config, recorder = _maxtext_config(task, mode, scan)
        import jax
        from flax import nnx
        from flax.core.spmd import logical_axis_rules
        from maxtext.trainers.pre_train import train
        from maxtext.utils import sharding, train_utils

        with _injected():
            ready = train_utils.setup_train_loop(config, recorder)
        placements, mesh, whole = ready[2], ready[4], ready[10]
        adapters = peers.count(whole.model)
        graph, state = nnx.split(whole)
        params, placements = sharding.maybe_update_params_sharding_with_opt(config, placements)
        step, _ = train_utils.jit_train_and_eval_step(
            config, graph, mesh, state, placements, train.train_step, train.eval_step, None, params
        )
        rows = sharding.get_input_data_sharding(config, mesh)
        feed = (jax.device_put(batch, rows) for batch in map(_for_maxtext, batches))
        first = next(feed)
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            # Compiled now, so that options of JAX that are set later do not compile it again.
            step = step.lower(state, first).compile()
    feed = itertools.chain([first], feed)

    def run() -> tuple[float, float | None]:
        nonlocal state
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            state, metrics = step(state, next(feed))
        said = metrics["scalar"]
        balance = float(said["learning/moe_lb_loss"]) / task.balance
        return float(said["learning/lm_loss"]), balance if config.num_experts > 1 else None

    return peers.Way(run, adapters)


def maxtext_on_tunix(task: peers.Task, mode: str, scan: bool, batches: Sequence[Any]) -> peers.Way:
    """MaxText's SFT trainer: Tunix's with a model of MaxText, which injects adapters by itself."""
    peers.need("maxtext")
    peers.need("tunix")
    with _quiet():
        config, recorder = _maxtext_config(task, mode, scan)
        import jax
        from flax.core.spmd import logical_axis_rules
        from maxtext.trainers.post_train.sft import train_sft
        from maxtext.utils import sharding

        trainer, mesh = train_sft.setup_trainer_state(config, recorder)
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=config.num_experts <= 1)
        rows = sharding.get_input_data_sharding(config, mesh)
    feed = map(_for_maxtext, batches)

    def run() -> tuple[float, float | None]:
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            _, said, _ = step(jax.device_put(next(feed), rows))
        loss = float(said["xent_sum"]) / float(said["total_weights"])
        balance = float(said["moe_lb_loss"]) / task.balance
        return loss, balance if config.num_experts > 1 else None

    return peers.Way(run, peers.count(trainer.model))


_MAXTEXT_MODELS = {"llama3_1": "llama3.1-8b", "gemma4_26b": "gemma4-26b", "mixtral": "mixtral-8x7b"}
_MAXTEXT_SIZES = {
    "hidden_size": "base_emb_dim",
    "intermediate_size": "base_mlp_dim",
    "num_hidden_layers": "base_num_decoder_layers",
    "num_attention_heads": "base_num_query_heads",
    "num_key_value_heads": "base_num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "global_head_dim": "global_head_dim",
    "num_global_key_value_heads": "global_num_kv_heads",
    "moe_intermediate_size": "base_moe_mlp_dim",
    "sliding_window": "sliding_window_size",
    "num_experts": "num_experts",
    "num_local_experts": "num_experts",
    "top_k_experts": "num_experts_per_tok",
    "num_experts_per_tok": "num_experts_per_tok",
}


def _maxtext_sizes(task: peers.Task) -> dict[str, Any]:
    """The keys of MaxText's config that give a model the task's shape."""
    model = next((m for s, m in _MAXTEXT_MODELS.items() if task.shape.startswith(s)), None)
    if model is None:
        raise peers.NotThere("no such model")
    # Families differ in what they call a size, and leave out or set to null what they have not.
    named = [(theirs, task.sizes.get(ours)) for ours, theirs in _MAXTEXT_SIZES.items()]
    sizes = {theirs: value for theirs, value in named if value is not None}
    if "num_experts" in sizes:
        sizes.setdefault("base_moe_mlp_dim", sizes["base_mlp_dim"])
        # The dense products: the others are kernels for TPUs.
        sizes |= {"sparse_matmul": False, "megablox": False}
        sizes["load_balance_loss_weight"] = task.balance
    return {"model_name": model, "override_model_config": True, **sizes}


def _maxtext_config(task: peers.Task, mode: str, scan: bool) -> tuple[Any, Any]:
    """MaxText's settings for the task, and its recorder."""
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # Read when it is imported.
    from maxtext.trainers.pre_train import train
    from maxtext.utils import globals as places

    keys = {
        **_maxtext_sizes(task),
        "run_name": f"{mode}-{scan}",
        "base_output_directory": f"{task.folder}/maxtext",
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "enable_goodput_recording": False,
        "monitor_goodput": False,
        "enable_tensorboard": False,
        "log_config": False,
        "jax_cache_dir": "",
        "dataset_type": "synthetic",  # Never asked for a batch.
        "use_sft": mode == "sft",
        "scan_layers": scan,
        "remat_policy": task.remat,
        "attention": "dot_product",
        "dtype": "float32",
        "max_target_length": task.length,
        "per_device_batch_size": 1,
        "ici_fsdp_parallelism": task.devices,
        "sharding_tolerance": 1.0,  # Its check is for models that are large beside their vectors.
        "steps": 10**6,
        "learning_rate": task.rate,
        "learning_rate_final_fraction": 1.0,
        "warmup_steps_fraction": 0.0,
        "adam_b2": 0.999,
        "adam_weight_decay": 0.0,
        "gradient_clipping_threshold": 1.0,
        "enable_dropout": False,
        "lora.enable_lora": True,
        "lora.lora_rank": task.rank,
        "lora.lora_alpha": task.alpha,
        "lora.lora_weight_qtype": "int8",
        "lora.lora_tile_size": task.tile,
    }
    file = os.path.join(places.MAXTEXT_CONFIGS_DIR, "base.yml")
    return train.initialize(["", file, *(f"{key}={value}" for key, value in keys.items())])


@contextlib.contextmanager
def _injected() -> Iterator[None]:
    """Adapters in every model that MaxText creates meanwhile, which its train loop leaves out."""
    from maxtext.utils import model_creation_utils as creation

    plain = creation.get_nnx_create_model_fn

    def factory(config: Any, mesh: Any = None, *rest: Any, **named: Any) -> Callable[[], Any]:
        create = plain(config, mesh, *rest, **named)
        return lambda: _with_adapters(create(), config)

    with mock.patch.object(creation, "get_nnx_create_model_fn", factory):
        yield


def _with_adapters(model: Any, config: Any) -> Any:
    import jax
    import jax.numpy as jnp
    import qwix
    from flax import nnx
    from maxtext.utils import lora_utils

    ids = jnp.zeros((jax.device_count(), 1), jnp.int32)
    adapted = qwix.apply_lora_to_model(
        model,
        lora_utils._build_lora_provider(config),
        decoder_input_tokens=ids,
        decoder_positions=ids,
        rngs=model.decoder.rngs,
    )
    # What the trace leaves behind would be carried as state, and not match the step's.
    nnx.pop(adapted, nnx.Intermediate)
    for _, node in nnx.iter_graph(adapted):
        if "qwix_rngs" in getattr(node, "__dict__", {}):
            del node.qwix_rngs
        if isinstance(node, nnx.LoRAParam):
            whole = jax.sharding.PartitionSpec()
            node.set_metadata(sharding=whole, out_sharding=None, sharding_names=None)
    return adapted


def _for_maxtext(batch: Any) -> dict[str, Any]:
    """A batch as MaxText takes it: what it trains on is where the targets have a segment."""
    import numpy as np

    tokens, targets, weights, segments, positions = (np.asarray(array[0]) for array in batch)
    return {
        "inputs": tokens,
        "inputs_position": positions,
        "inputs_segmentation": segments,
        "targets": targets,
        "targets_position": positions,
        "targets_segmentation": (weights > 0).astype(np.int32) * segments,
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on stdout, where MaxText prints much."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
