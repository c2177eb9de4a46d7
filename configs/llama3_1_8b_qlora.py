r"""QLoRA of Llama 3.1 8B on one accelerator: an int8 base, adapters on all linear layers.

    python -m purelora.train --config=configs/llama3_1_8b_qlora.py --config.model.path=FOLDER

FOLDER holds the model as Hugging Face has it (config.json, safetensors, tokenizer.json); the data
are chats, one JSON object a line, see `data` in configs/base.py. Mesh: one device, or `fsdp` over
as many as there are. Memory: 20.9 GB on one device, 2 rows of 2,048 tokens at a time, by

    python -m purelora.estimate --config=configs/llama3_1_8b_qlora.py \
        --config.model.path=configs/shapes/llama3_1_8b.json

The same with random weights of a small shape, in a minute without the model:

    python -m purelora.train --config=configs/llama3_1_8b_qlora.py:small
"""

from configs import base, variants


def get_config(variant="full"):
    c = base.get_config()
    c.workdir = "runs/llama3_1_8b_qlora"
    c.epochs = 1
    c.batch_size = 16
    c.accum_steps = 8
    c.max_length = 2048
    c.remat = "full"
    c.model.path = "meta-llama/Llama-3.1-8B-Instruct"
    c.model.weights_dtype = "bfloat16"
    c.quant.qtype = "int8"
    c.lora.r = 16
    c.lora.lora_alpha = 32.0
    c.optim.learning_rate = 2e-4
    c.optim.warmup_steps = 20
    return variants.chosen(c, variant, "llama3_1_8b.json")
