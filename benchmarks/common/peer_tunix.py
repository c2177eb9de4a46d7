"""Tunix's trainer for benchmarks/trainers.py, on batches that purelora's run made.

Tunix is imported only when a trainer is asked for.
"""

from collections.abc import Callable, Sequence
from typing import Any

from common import peers


def tunix(task: peers.Task, mode: str, scan: bool, batches: Sequence[Any]) -> peers.Way:
    """Tunix's train step as `PeftTrainer.train` calls it; the mode is in the batches' weights."""
    del mode, scan
    peers.need("tunix")
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

    return peers.Way(run, peers.count(trainer.model))


def _optimiser(task: peers.Task, optax: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(task.rate, weight_decay=0.0))


_MLP = ("gate_proj", "up_proj", "down_proj")


def _tunix_model(task: peers.Task) -> tuple[Callable[[Any], Any], tuple[str, ...]]:
    """Tunix's model of the task's shape, from its Rngs, and names of the modules to adapt."""
    if task.shape.startswith("llama3"):
        return _tunix_llama3(task)
    if task.shape.startswith("gemma4"):
        return _tunix_gemma4(task)
    raise peers.NotThere("no such model")


def _tunix_llama3(task: peers.Task) -> tuple[Callable[[Any], Any], tuple[str, ...]]:
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


def _tunix_gemma4(task: peers.Task) -> tuple[Callable[[Any], Any], tuple[str, ...]]:
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


def _remat(task: peers.Task, module: Any) -> Any:
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
