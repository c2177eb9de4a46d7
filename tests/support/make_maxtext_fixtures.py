"""Writes tests/fixtures/maxtext with the maxtext package: tiny checkpoints, and their logits.

    python tests/support/make_maxtext_fixtures.py [NAME ...]

Needs Python 3.12 and the packages that tests/fixtures/maxtext/README.md lists, not purelora. Models
are made, saved and run by MaxText: what it initialises is only made noisy, so that norms, biases
and
adapters matter. See the README for what is in a fixture.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile

os.environ |= {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import qwix
from flax import nnx
from maxtext.common import checkpointing, train_state_nnx
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.trainers.post_train.sft import train_sft
from maxtext.utils import lora_utils, train_utils

ROOT = pathlib.Path(__file__).parents[1] / "fixtures" / "maxtext"
BASE_YML = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
VOCAB, LENGTH, ROWS = 48, 12, 2

# What all fixtures have: small sizes, all different where they can be, and exact arithmetic.
SHARED = {
    "hardware": "cpu",
    "dataset_type": "synthetic",
    "enable_checkpointing": True,
    "async_checkpointing": False,
    "checkpoint_period": 1,
    "jax_cache_dir": "",
    "skip_jax_distributed_system": True,
    "override_model_config": True,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "sharding_tolerance": 1.0,
    "attention": "dot_product",
    "steps": 1,
    "per_device_batch_size": 1,
    "max_target_length": 16,
    "dtype": "float32",
    "weight_dtype": "bfloat16",
    "matmul_precision": "highest",
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_num_decoder_layers": 3,
    "base_mlp_dim": 24,
    "head_dim": 8,
    "vocab_size": VOCAB,
}
HF_SHARED = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA31 = HF_SHARED | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA31_ROPE,
}
GEMMA = HF_SHARED | {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 8,
    "sliding_window": 5,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
LORA = {"enable_lora": True, "lora_rank": 3, "lora_alpha": 6.0}

# name: MaxText's model_name and keys, and the config.json that says the same.
FIXTURES = {
    # A whole train state: parameters, moments of AdamW, step and random state.
    "llama-axis1": ("llama3.1-8b", {"param_scan_axis": 1, "weight_dtype": "float32"}, LLAMA31),
    "llama-axis0": ("llama3.1-8b", {"param_scan_axis": 0}, LLAMA31),
    # Not in one OCDBT store but a folder for each array, in zarr's older format.
    "llama-unscanned": (
        "llama3.1-8b",
        {
            "scan_layers": False,
            "checkpoint_storage_use_ocdbt": False,
            "checkpoint_storage_use_zarr3": False,
        },
        LLAMA31,
    ),
    # As many layers as heads and as the model is wide: only one shape tells the axes apart.
    "llama-square": (
        "llama2-7b",
        {"base_num_decoder_layers": 4, "base_emb_dim": 4, "base_mlp_dim": 6, "head_dim": 2,
         "base_num_kv_heads": 4},
        HF_SHARED | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": 4,
            "intermediate_size": 6,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "head_dim": 2,
            "rope_theta": 10000.0,
        },
    ),
    "mistral": (
        "mistral-7b",
        {},
        HF_SHARED | {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "hidden_act": "silu",
            "rope_theta": 1000000.0,
            "sliding_window": None,
        },
    ),
    # Biases; head and embedding are one table.
    "qwen2": (
        "qwen2.5-1.5b",
        {},
        HF_SHARED | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": (
        "qwen3-8b",
        {},
        HF_SHARED | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
        },
    ),
    # Mixtures of experts.
    "mixtral": (
        "mixtral-8x7b",
        {"num_experts": 4, "base_moe_mlp_dim": 24, "megablox": False, "sparse_matmul": False,
         "capacity_factor": -1.0},
        HF_SHARED | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_act": "silu",
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3-moe": (
        "qwen3-30b-a3b",
        {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 6, "base_mlp_dim": 6,
         "megablox": False, "sparse_matmul": False, "capacity_factor": -1.0, "param_scan_axis": 0},
        HF_SHARED | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "rope_theta": 10000000.0,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    # Two layers make one of MaxText's; and MaxText's table has rows that no token has.
    "gemma2": (
        "gemma2-2b",
        {"base_num_decoder_layers": 2, "sliding_window_size": 5, "vocab_size": 64,
         "attn_logits_soft_cap": 2.0, "final_logits_soft_cap": 5.0},
        GEMMA | {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "num_hidden_layers": 4,
            "rope_theta": 10000.0,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma2-unscanned": (
        "gemma2-2b",
        {"base_num_decoder_layers": 1, "sliding_window_size": 5, "scan_layers": False,
         "attn_logits_soft_cap": 2.0, "final_logits_soft_cap": 5.0},
        GEMMA | {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "num_hidden_layers": 2,
            "rope_theta": 10000.0,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    # Two blocks of six layers and a remainder of one, with adapters on some modules.
    "gemma3": (
        "gemma3-4b",
        {"base_num_decoder_layers": 13, "sliding_window_size": 5, "base_emb_dim": 8,
         "base_mlp_dim": 12, "base_num_query_heads": 2, "base_num_kv_heads": 1,
         "lora": LORA | {"lora_module_path": ".*(self_attention/query|mlp/wo)"}},
        GEMMA | {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 13,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "sliding_window_pattern": 6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    # Adapters alone, which is what MaxText's trainers save. Their base is that of llama-axis0.
    "llama-adapters": ("llama3.1-8b", {"lora": LORA, "param_scan_axis": 0}, LLAMA31),
    # The same from its SFT trainer, which is Tunix's, for llama-axis1. It does not say lora_alpha.
    "llama-adapters-sft": ("llama3.1-8b", {"lora": LORA, "weight_dtype": "float32"}, LLAMA31),
}  # fmt: skip


def settings(out: str, model: str, keys: dict) -> object:
    """MaxText's config."""
    keys = SHARED | {"model_name": model, "base_output_directory": out, "run_name": "run"} | keys
    lora = keys.pop("lora", {})
    keys |= {f"lora.{key}": value for key, value in lora.items()}
    return pyconfig.initialize(["", str(BASE_YML), *[f"{k}={v}" for k, v in keys.items()]])


def noisy(model: nnx.Module, rng: np.random.Generator, is_tied: bool) -> None:
    """Adds noise to all parameters, in place.

    A tied table gets values that bfloat16 can hold, as MaxText rounds it for the logits alone.
    """
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param):
            values = np.asarray(variable[...], np.float32)
            values = values + 0.1 * rng.standard_normal(values.shape, np.float32)
            if path[-1] == "embedding" and is_tied:
                values = values.astype(jnp.bfloat16)
            variable.set_value(jnp.asarray(values, variable[...].dtype))


def with_adapters(model: nnx.Module, config: object, mesh: jax.sharding.Mesh) -> nnx.Module:
    """Injects adapters as MaxText does: its provider through qwix."""
    tokens, positions = lora_utils._prepare_dummy_inputs(mesh)
    model = qwix.apply_lora_to_model(
        model,
        lora_utils._build_lora_provider(config),
        decoder_input_tokens=tokens,
        decoder_positions=positions,
        rngs=model.decoder.rngs,
    )
    nnx.pop(model, nnx.Intermediate)
    for _, value in nnx.iter_graph(model):
        if hasattr(value, "__dict__") and "qwix_rngs" in value.__dict__:
            del value.qwix_rngs
        if isinstance(value, nnx.LoRAParam):  # As MaxText itself does after the injection.
            whole = jax.sharding.PartitionSpec()
            value.set_metadata(sharding=whole, out_sharding=None, sharding_names=None)
    return model


def logits(model: nnx.Module, tokens: np.ndarray) -> np.ndarray:
    """MaxText's own forward pass, `[B, T, V]`, of rows of one document each."""
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(
        model(
            decoder_input_tokens=jnp.asarray(tokens, jnp.int32),
            decoder_positions=jnp.asarray(positions, jnp.int32),
            decoder_segment_ids=jnp.ones(tokens.shape, jnp.int32),
            enable_dropout=False,
        ),
        np.float32,
    )


def saved_state(name: str, model: nnx.Module, optimizer: object) -> nnx.State:
    if name == "llama-axis1":
        return nnx.state(train_state_nnx.TrainStateNNX(model, optimizer))
    return nnx.State({"model": nnx.state(model, nnx.Param)})


def save_by_tunix(model: nnx.Module, config: object, schedule: object) -> None:
    """Saves as MaxText's SFT trainer does after a step."""
    optimizer = optimizers.get_optimizer(config, schedule, model)
    trainer = train_sft.MaxTextPeftTrainer(model, optimizer, train_sft.get_tunix_config(config))
    manager = trainer.checkpoint_manager
    manager.save(
        1,
        model,
        None,  # The moments would be two more copies.
        save_only_lora_params=True,
        force=True,
        custom_metadata=trainer.custom_checkpoint_metadata(),
    )
    manager.close()


def make(name: str) -> None:
    """Writes the fixture `name`."""
    model_name, keys, hf_config = FIXTURES[name]
    with tempfile.TemporaryDirectory() as out:
        config = settings(out, model_name, keys)
        made = train_utils.setup_train_loop(config, None)
        manager, mesh, train_state = made[1], made[4], made[10]
        rng = np.random.default_rng(0)
        noisy(train_state.model, rng, hf_config["tie_word_embeddings"])
        tokens = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
        results = {"tokens": tokens, "logits": logits(train_state.model, tokens)}
        model = train_state.model
        if config.lora.enable_lora:
            model = with_adapters(model, config, mesh)
            for _, variable in nnx.iter_graph(model):
                if isinstance(variable, nnx.LoRAParam):
                    values = 0.3 * rng.standard_normal(variable.shape, np.float32)
                    variable.set_value(jnp.asarray(values, variable[...].dtype))
            results["adapted_logits"] = logits(model, tokens)
        state = saved_state(name, model, train_state.optimizer)
        # With adapters on, MaxText's writer keeps only them; without its config, all that it gets.
        if name == "llama-adapters-sft":
            save_by_tunix(model, config, made[5])
        elif name == "gemma3":
            state = train_state_nnx.to_checkpoint_dict(state)
            notes = {"scan_layers": config.scan_layers, "lora": config.lora.model_dump()}
            manager.save_checkpointables(0, {"items": state}, force=True, custom_metadata=notes)
        else:
            checkpointing.save_checkpoint(manager, 0, state, config, None, True)
        checkpointing.wait_until_finished(manager)
        folder = ROOT / name
        shutil.rmtree(folder, ignore_errors=True)
        # How arrays lay over devices is not needed to read them, and makes a sixth of the bytes;
        # the other file holds the name of the temporary folder.
        skip = shutil.ignore_patterns("_sharding", "commit_success.txt")
        shutil.copytree(
            os.path.join(out, "run", "checkpoints"), folder / "checkpoints", ignore=skip
        )
        (folder / "config.json").write_text(json.dumps(hf_config, indent=1) + "\n")
        np.savez_compressed(folder / "reference.npz", **results)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or FIXTURES:
        make(chosen)
        print(chosen, flush=True)
