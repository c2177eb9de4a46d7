"""LoRA on a real model without quantisation: SmolLM2-135M-Instruct learns to define words.

    python -m purelora.train --config=configs/lora.py

As configs/qlora.py, but the base stays in float32. Six minutes at the lowest priority beside other
work (load 3.2) on two CPU cores, 2.3 GB; eval loss 3.32 before and 1.60 after.
"""

from configs import qlora


def get_config():
    c = qlora.get_config()
    c.workdir = "runs/lora"
    c.quant.qtype = "none"
    return c
