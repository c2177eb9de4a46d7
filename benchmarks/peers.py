"""Other libraries' trainers for benchmarks/trainers.py: Tunix's and MaxText's.

Each of `tunix`, `maxtext` and `maxtext_on_tunix` sets a trainer up and returns it as a `Way`, whose
`step` trains on the next of the batches that purelora's run made. A library is imported only when
its way is asked for.
"""

import contextlib
import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock


class Way(NamedTuple):
    """A trainer that is ready to run.

    Attributes:
      step: takes the next step and returns its loss; and for a mixture of experts the
        load-balancing loss divided by the number of experts of a token, else None.
      adapters: how many parameters are trained.
    """

    step: Callable[[], tuple[float, float | None]]
    adapters: int


class Task(NamedTuple):
    """What all trainers do.

    Attributes:
      shape: name of the file in configs/shapes/small.
      sizes: the contents of that file.
      rank: rank of the adapters.
      alpha: their lora_alpha.
      tile: tile size of the int8 base.
      rate: learning rate.
      balance: coefficient of the load-balancing loss.
      remat: "none" or "full".
      devices: number of devices, all along fsdp; each gets one row.
      length: tokens of a row.
      folder: where a peer may write.
    """

    shape: str
    sizes: Mapping[str, Any]
    rank: int
    alpha: float
    tile: int
    rate: float
    balance: float
    remat: str
    devices: int
    length: int
    folder: str


class NotThere(Exception):
    """A peer that is not installed, or has no such model."""


def tried(make: Callable[[], Way]) -> Way | str:
    """The way, whose first step is known to succeed; or why there is none."""
    try:
        way = make()
        taken = itertools.chain([way.step()], iter(way.step, None))
        return way._replace(step=functools.partial(next, taken))
    except NotThere as error:
        return str(error)
    except Exception as error:  # Whatever a peer raises belongs in the table.
        return f"fails: {type(error).__name__}: {' '.join(str(error).split())[:110]}"


def need(package: str) -> None:
    """Raises NotThere without the package."""
    if importlib.util.find_spec(package) is None:
        raise NotThere("not installed")


def count(module: Any) -> int:
    """Elements of all adapters of an NNX module. Raises ValueError if it has none."""
    import jax
    from flax import nnx

    found = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.LoRAParam)))
    if not found:
        raise ValueError("no adapters were injected")
    return found


def tunix(task: Task, mode: str, scan: bool, batches: Sequence[Any]) -> Way:
    """Tunix's train step as `PeftTrainer.train` calls it; the mode is in the batches' weights."""
    del mode, scan
    need("tunix")
    import jax
    import numpy as np
    import optax
    import qwix
    from flax import nnx
    from tunix.sft import peft_trainer

    create, modules = _tunix_model(task)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(task.devices, 1), ("fsdp", "tp"))
    rules = qwix.LoraProvider(
        module_path="|".join(f".*{name}" for name in modules),
        rank=task.rank,
        alpha=task.alpha,
        weight_qtype="int8",
        tile_size=task.tile,
    )

    def placed(module: Any) -> Any:
        leaves = nnx.state(module)
        nnx.update(module, jax.lax.with_sharding_constraint(leaves, nnx.get_partition_spec(leaves)))
        return module

    with mesh:
        whole = nnx.jit(lambda: placed(create(nnx.Rngs(0))))()
        adapted = qwix.apply_lora_to_model(
            whole, rules, rngs=nnx.Rngs(1), **whole.get_model_input()
        )
        settings = peft_trainer.TrainingConfig(eval_every_n_steps=10**6, max_steps=10**6)
        trainer = peft_trainer.PeftTrainer(placed(adapted), _optimiser(task, optax), settings)
        step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    feed = map(_for_tunix, batches)

    def run() -> tuple[float, None]:
        with mesh:
            loss, *_ = step(jax.device_put(next(feed), rows))
        return float(loss), None

    return Way(run, count(trainer.model))


def _optimiser(task: Task, optax: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(task.rate, weight_decay=0.0))


_MLP = ("gate_proj", "up_proj", "down_proj")


def _tunix_model(task: Task) -> tuple[Callable[[Any], Any], tuple[str, ...]]:
    """Tunix's model of the task's shape, from its Rngs, and names of the modules to adapt."""
    if task.shape.startswith("llama3"):
        return _tunix_llama3(task)
    if task.shape.startswith("gemma4"):
        return _tunix_gemma4(task)
    raise NotThere("no such model")


def _tunix_llama3(task: Task) -> tuple[Callable[[Any], Any], tuple[str, ...]]:
    from tunix.models.llama3 import model as llama3

    c = task.sizes
    config = llama3.ModelConfig(
        num_layers=c["num_hidden_layers"],
        vocab_size=c["vocab_size"],
        embed_dim=c["hidden_size"],
        hidden_dim=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        rope_theta=int(c["rope_theta"]),
        norm_eps=c["rms_norm_eps"],
        remat_config=_remat(task, llama3),
    )
    names = ("q_proj", "k_proj", "v_proj", "o_proj", *_MLP)
    return lambda rngs: llama3.Llama3(config, rngs=rngs), names


def _tunix_gemma4(task: Task) -> tuple[Callable[[Any], Any], tuple[str, ...]]:
    from tunix.models.gemma4 import model as gemma4

    c, kinds = task.sizes, gemma4.AttentionType
    config = gemma4.ModelConfig(
        num_layers=c["num_hidden_layers"],
        num_embed=c["vocab_size"],
        embed_dim=c["hidden_size"],
        hidden_dim=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        head_dim=c["head_dim"],
        num_kv_heads=c["num_key_value_heads"],
        num_global_kv_heads=c["num_global_key_value_heads"],
        global_key_size=c["global_head_dim"],
        sliding_window_size=c["sliding_window"],
        final_logit_softcap=c["final_logit_softcapping"],
        k_eq_v_global=c["attention_k_eq_v"],
        enable_moe=True,
        num_experts=c["num_experts"],
        num_experts_per_tok=c["top_k_experts"],
        expert_dim=c["moe_intermediate_size"],
        moe_dense_hidden_dim=c["intermediate_size"],
        attention_pattern=tuple(
            kinds.GLOBAL if kind == "full_attention" else kinds.LOCAL_SLIDING
            for kind in c["layer_types"]
        ),
        remat_config=_remat(task, gemma4),
    )
    names = ("q_einsum", "k_einsum", "kv_einsum", "attn_vec_einsum", *_MLP)
    return lambda rngs: gemma4.Gemma4(config, rngs=rngs), names


def _remat(task: Task, module: Any) -> Any:
    return module.RematConfig.DECODER if task.remat == "full" else module.RematConfig.NONE


def _for_tunix(batch: Any) -> dict[str, Any]:
    """A batch as Tunix takes it, which shifts tokens and mask by itself."""
    import numpy as np

    tokens, weights, segments, positions = (
        np.asarray(array[0])
        for array in (batch.tokens, batch.weights, batch.segment_ids, batch.positions)
    )
    causal = np.tril(np.ones((tokens.shape[1],) * 2, bool))
    return {
        "input_tokens": tokens,
        "input_mask": np.pad(weights[:, :-1], ((0, 0), (1, 0))) > 0,
        "positions": positions,
        "attention_mask": (segments[:, :, None] == segments[:, None, :]) & causal,
    }


def maxtext(task: Task, mode: str, scan: bool, batches: Sequence[Any]) -> Way:
    """The step of MaxText's train loop, which pretraining and SFT share."""
    need("maxtext")
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
        adapters = count(whole.model)
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

    return Way(run, adapters)


def maxtext_on_tunix(task: Task, mode: str, scan: bool, batches: Sequence[Any]) -> Way:
    """MaxText's SFT trainer: Tunix's with a model of MaxText, which injects adapters by itself."""
    need("maxtext")
    need("tunix")
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

    return Way(run, count(trainer.model))


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


def _maxtext_sizes(task: Task) -> dict[str, Any]:
    """The keys of MaxText's config that give a model the task's shape."""
    model = next((m for s, m in _MAXTEXT_MODELS.items() if task.shape.startswith(s)), None)
    if model is None:
        raise NotThere("no such model")
    # Families differ in what they call a size, and leave out or set to null what they have not.
    named = [(theirs, task.sizes.get(ours)) for ours, theirs in _MAXTEXT_SIZES.items()]
    sizes = {theirs: value for theirs, value in named if value is not None}
    if "num_experts" in sizes:
        sizes.setdefault("base_moe_mlp_dim", sizes["base_mlp_dim"])
        # The dense products: the others are kernels for TPUs.
        sizes |= {"sparse_matmul": False, "megablox": False}
        sizes["load_balance_loss_weight"] = task.balance
    return {"model_name": model, "override_model_config": True, **sizes}


def _maxtext_config(task: Task, mode: str, scan: bool) -> tuple[Any, Any]:
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
