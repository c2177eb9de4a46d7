"""A smoke run in seconds: a tiny random Llama, no download.

python -m purelora.train --config=configs/tiny.py

Ten seconds and 0.6 GB; eval loss 5.57 before and 5.21 after.
"""

from configs import base


def get_config():
    c = base.get_config()
    c.workdir = "runs/tiny"
    c.steps = 20
    c.batch_size = 8
    c.accum_steps = 2
    c.max_length = 128
    c.dtype = "float32"
    c.model.path = "tiny"
    c.lora.r = 4
    c.lora.lora_alpha = 8.0
    c.quant.qtype = "int8"
    c.data.eval_fraction = 0.02
    c.data.too_long = "truncate"
    c.optim.learning_rate = 1e-2
    c.optim.schedule = "linear"
    c.checkpoint.save_steps = 10
    return c
