r"""QLoRA of Qwen3 8B on one accelerator: an nf4 base, adapters on all linear layers.

    python -m purelora.train --config=configs/qwen3_8b_qlora.py --config.model.path=FOLDER

FOLDER holds the model as Hugging Face has it. Its chat template thinks unless it is told not to:
data without thoughts go with enable_thinking=False, in training as in what is asked later. Mesh:
one device, or `fsdp` over as many as there are. Memory: 19.1 GB on one device, 2 rows of 2,048
tokens at a time, by

    python -m purelora.estimate --config=configs/qwen3_8b_qlora.py \
        --config.model.path=configs/shapes/qwen3_8b.json

The same with random weights of a small shape, in a minute without the model:

    python -m purelora.train --config=configs/qwen3_8b_qlora.py:small
"""

from configs import llama3_1_8b_qlora, variants


def get_config(variant="full"):
    c = llama3_1_8b_qlora.get_config()
    c.workdir = "runs/qwen3_8b_qlora"
    c.model.path = "Qwen/Qwen3-8B"
    c.data.chat_template_kwargs = {"enable_thinking": False}
    c.quant.qtype = "nf4"
    c.quant.tile_size = 64
    return variants.chosen(c, variant, "qwen3_8b.json")
