r"""LoRA of Gemma 3 4B on one accelerator: a bfloat16 base, adapters on all linear layers.

    python -m purelora.train --config=configs/gemma3_4b_lora.py --config.model.path=FOLDER

FOLDER holds the model as Hugging Face has it; of one with images the text part is trained. Mesh:
one device, or `fsdp` over as many as there are. Memory: 27.3 GB on one device, 2 rows of 2,048
tokens at a time (most of it the working space of XLA's CPU compiler, see docs/plans.md), by

    python -m purelora.estimate --config=configs/gemma3_4b_lora.py \
        --config.model.path=configs/shapes/gemma3_4b.json

The same with random weights of a small shape, in a minute without the model:

    python -m purelora.train --config=configs/gemma3_4b_lora.py:small
"""

from configs import llama3_1_8b_qlora, variants


def get_config(variant="full"):
    c = llama3_1_8b_qlora.get_config()
    c.workdir = "runs/gemma3_4b_lora"
    c.model.path = "google/gemma-3-4b-it"
    c.quant.qtype = "none"
    return variants.chosen(c, variant, "gemma3_4b.json")
