"""QLoRA on a real model: SmolLM2-135M-Instruct with an int8 base learns to define words.

python -m purelora.train --config=configs/qlora.py

Four minutes and 1.9 GB on two shared CPU cores; eval loss 3.32 before and 1.60 after. To vary it:
--config.dtype=bfloat16 is faster with jax 0.12, --config.lora.target_modules=q_proj,v_proj trains
fewer adapters, --config.data.train=FILE.jsonl another task (--config.workdir=… for its folder).
"""

from configs import base


def get_config():
    c = base.get_config()
    c.workdir = "runs/qlora"
    c.steps = 30
    c.batch_size = 4
    c.max_length = 256
    c.dtype = "float32"
    c.model.path = "smollm2-135m"
    c.quant.qtype = "int8"
    c.lora.r = 16
    c.data.eval_fraction = 0.05
    c.optim.learning_rate = 1e-3
    c.optim.warmup_steps = 5
    c.sample_prompts = (
        "What does the noun 'gratitude' mean?",
        "What does the verb 'to hesitate' mean?",
    )
    return c
