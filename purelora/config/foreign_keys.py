"""What other programs call a key, and what a misspelt key was probably meant to be."""

import difflib

from purelora.config import schema
from purelora.core import errors
from purelora.core.paths import Path

# Names of MaxText, PEFT, TRL and Axolotl that a key answers only with a word beside it.
_WITH_REMARKS = {
    "lora.lora_module_path": "lora.target_modules (names or a regex over Hugging Face names)",
    "load_full_state_path": "workdir with checkpoint.resume='must'",
    "tokenizer_path": "model.path (the tokenizer is the model's; of MaxText's: model.hf_folder)",
    "per_device_batch_size": "batch_size (rows per update over all devices)",
    "per_device_train_batch_size": "batch_size (rows per update over all devices)",
    "micro_batch_size": "batch_size and accum_steps (batch_size / accum_steps rows each)",
    "sharding_tolerance": "mesh.overrides (keeps a named weight whole; no other large one may be)",
}
# What PEFT has and purelora has not.
_WITHOUT_KEY = {
    "lora.fan_in_fan_out": "no key: it is for Conv1D weights, which none of the families has",
    "lora.lora_bias": "no key: a bias on lora_b is not supported; lora.bias trains the model's own",
    "lora.layer_replication": "no key: replicated layers are not supported",
    "lora.use_qalora": "no key: QA-LoRA is not supported",
    "lora.megatron_config": "no key: mesh.* splits the model",
    "lora.loftq_config": "no key: LoftQ uses quant.qtype and one iteration",
    "lora.ensure_weight_tying": "no key: a tied embedding that is trained stays tied",
}
# The answer to every name: the key that does it here, or why there is none.
FOREIGN_KEYS = {
    **{name: path for path, it in schema.KEYS.items() for name in it.key.other_names},
    **_WITH_REMARKS,
    **_WITHOUT_KEY,
}


def unknown_key(key: str) -> errors.Problem:
    """The problem of a key that does not exist: names what does the same, or what is nearest."""
    if key in FOREIGN_KEYS:
        answer = FOREIGN_KEYS[key]
        remedy = answer if answer.startswith("no key") else f"use {answer}"
        return errors.Problem(key, None, "is not a key of purelora", remedy)
    leaf = Path(key).name
    same_leaf = [path for path in schema.KEYS if path.name == leaf]
    by_leaf = {path.name: path for path in schema.KEYS}
    near_leaf = [by_leaf[k] for k in difflib.get_close_matches(leaf, by_leaf, n=2, cutoff=0.75)]
    near_key = difflib.get_close_matches(key, schema.KEYS, n=2)
    near = dict.fromkeys([*same_leaf, *near_key, *near_leaf])
    remedy = (
        "did you mean " + " or ".join(near) + "?" if near else "configs/base.py names every key"
    )
    return errors.Problem(key, None, "is not a key of purelora", remedy)
