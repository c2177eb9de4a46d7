"""How adapters begin: fresh, or out of the weights; and that resuming rebuilds it."""

import pathlib
from typing import Any

import chex
import jax
import numpy as np
import pytest
import test_train

run, records, built, saved_state = (
    test_train.run,
    test_train.records,
    test_train.built,
    test_train.saved_state,
)
FEATURES = {
    "pissa": ("--config.lora.init_lora_weights=pissa",),
    "pissa on a float base": (
        "--config.lora.init_lora_weights=pissa",
        "--config.quant.qtype=none",
        "--config.lora.rank_pattern={'k_proj': 2}",
    ),
    "olora": (
        "--config.lora.init_lora_weights=olora",
        "--config.lora.target_modules=q_proj,up_proj",
    ),
    "loftq": ("--config.lora.init_lora_weights=loftq", "--config.lora.use_rslora=True"),
    "dora": (
        "--config.lora.use_dora=True",
        "--config.lora.target_modules=q_proj,lm_head",
        "--config.lora.lora_dropout=0.2",
    ),
    "patterns": (
        "--config.lora.rank_pattern={'layers.1.self_attn.q_proj': 7, 'v_proj': 1}",
        "--config.lora.alpha_pattern={'up_proj': 3}",
        "--config.lora.init_lora_weights=gaussian",
    ),
    "whole modules": (
        "--config.lora.modules_to_save=norm,embed_tokens",
        "--config.optim.loraplus_lr_ratio=4",
    ),
    "tokens": (
        "--config.lora.trainable_token_indices=65,66",
        "--config.lora.target_modules=v_proj,lm_head",
    ),
    "embedding": ("--config.lora.target_modules=embed_tokens,q_proj",),
    "saved base": ("--config.checkpoint.save_base=True",),
    "saved int4 base": ("--config.checkpoint.save_base=True", "--config.quant.qtype=int4"),
}


def bits(leaf: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


@pytest.mark.parametrize("name", FEATURES)
def test_resumed_run_equals_the_unbroken_one(tmp_path: pathlib.Path, name: str):
    options = (*FEATURES[name], "--config.optim.schedule_steps=4")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole, "--config.steps=4", *options)
    run(broken, "--config.steps=2", *options)
    run(broken, "--config.steps=4", *options)
    one, other = ([r["loss"] for r in records(w, "train")] for w in (whole, broken))
    assert one == other
    assert len(one) == 4 and one[-1] < one[0]
    states = [saved_state(w, "--config.steps=4", *options) for w in (whole, broken)]
    chex.assert_trees_all_equal(*[jax.tree.map(bits, state) for state in states])
