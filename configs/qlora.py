"""QLoRA on a real model: SmolLM2-135M-Instruct with an int8 base learns to define words.

python -m purelora.train --config=configs/qlora.py
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
