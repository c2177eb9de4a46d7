r"""QLoRA of Gemma 4 26B-A4B on eight accelerators: an int8 base, adapters on attention and experts.

    python -m purelora.train --config=configs/gemma4_26b_qlora.py --config.model.path=FOLDER

FOLDER holds the model as Hugging Face has it; of one with images the text part is trained. All
experts have adapters; the router is frozen. Mesh: `expert` 4, so that each device computes 32 of
the 128 experts, and `fsdp` 2, which splits the storage. Memory: 18.1 GB on each of 8 devices, one
row of 2,048 tokens at a time, by

    python -m purelora.estimate --config=configs/gemma4_26b_qlora.py \
        --config.model.path=configs/shapes/gemma4_26b.json

The same with random weights of a small shape, in a minute without the model:

    python -m purelora.train --config=configs/gemma4_26b_qlora.py:small
"""

from configs import mixtral_8x7b_qlora, variants


def get_config(variant="full"):
    c = mixtral_8x7b_qlora.get_config()
    c.workdir = "runs/gemma4_26b_qlora"
    c.model.path = "google/gemma-4-26B-A4B-it"
    return variants.chosen(c, variant, "gemma4_26b.json")
