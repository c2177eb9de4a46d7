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
}  # fmt: skip
