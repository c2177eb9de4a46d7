"""A small config.json of every family, with all its particulars, for the tests of all of them."""

from typing import Any

VOCAB, LAYERS = 64, 3

_SHARED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_GEMMA: dict[str, Any] = _SHARED | {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 4,
    "rms_norm_eps": 1e-6,
}
del _GEMMA["tie_word_embeddings"]  # Left out, it is true here.
_PERIOD = ["sliding_attention", "sliding_attention", "full_attention"]
_GEMMA4: dict[str, Any] = _GEMMA | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "global_head_dim": 16,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
del _GEMMA4["query_pre_attn_scalar"], _GEMMA4["rope_theta"]
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SHARED | {"model_type": "llama"},
    "mistral": _SHARED | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "sliding_window": 5,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "qwen2": _SHARED | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "sliding_window": 3,
        "max_window_layers": 1,
    },
    "qwen2 with windows and yarn": _SHARED | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        },
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 1,
        "tie_word_embeddings": False,
    },
    "qwen3": _SHARED | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "rope_theta": 1e6,
        "head_dim": 16,
        "attention_bias": False,
    },
    "mixtral": _SHARED | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "sliding_window": None,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    "qwen3_moe": _SHARED | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rope_theta": 1e6,
        "head_dim": 16,
        "attention_bias": False,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    # Every second layer has experts, but for the last: d s d s d d.
    "qwen3_moe with plain layers": _SHARED | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "rope_theta": 1e6,
        "head_dim": 16,
        "attention_bias": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [5],
        "use_sliding_window": True,
        "sliding_window": 6,
    },
    "gemma2": _GEMMA | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    # Two layers that see a window, one that sees everything, and one is left over.
    "gemma3": _GEMMA | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window_pattern": 3,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    # Heads of other sizes, keys that are values, and a part of a period left over: s s f s s f s f.
    "gemma4": _GEMMA4 | {
        "num_hidden_layers": 8,
        "layer_types": [*_PERIOD, *_PERIOD, *_PERIOD[1:]],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
        "use_bidirectional_attention": "vision",
    },
    # An MLP and experts in every layer, which are not a multiple of what a token goes to.
    "gemma4 with experts": _GEMMA4 | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
    },
    # Experts in alternating columns, with biases; heads that are not all of the hidden size.
    "gpt_oss": _SHARED | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 12,
        "attention_bias": True,
        "intermediate_size": 20,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.75,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
    },
    # Inputs of every layer; the last three layers have no keys, and wider MLPs: s s f s f S S F.
    "gemma4 with shared keys": _GEMMA4 | {
        "num_hidden_layers": 8,
        "layer_types": [*_PERIOD, *_PERIOD[1:], *_PERIOD],
        "hidden_size_per_layer_input": 20,
        "vocab_size_per_layer_input": VOCAB + 2,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
}  # fmt: skip
