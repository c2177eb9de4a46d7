r"""QLoRA of Mixtral 8x7B on eight accelerators: an int8 base, adapters on attention and experts.

    python -m purelora.train --config=configs/mixtral_8x7b_qlora.py --config.model.path=FOLDER

FOLDER holds the model as Hugging Face has it. All experts have adapters; the router is frozen.
Mesh: `expert` 4, so that each device computes two experts, and `fsdp` 2, which splits the storage.
Memory: 17.1 GB on each of 8 devices, one row of 2,048 tokens at a time, by

    python -m purelora.estimate --config=configs/mixtral_8x7b_qlora.py \
        --config.model.path=configs/shapes/mixtral_8x7b.json

The same with random weights of a small shape, in a minute without the model:

    python -m purelora.train --config=configs/mixtral_8x7b_qlora.py:small
"""

from configs import llama3_1_8b_qlora, variants


def get_config(variant="full"):
    c = llama3_1_8b_qlora.get_config()
    c.workdir = "runs/mixtral_8x7b_qlora"
    c.model.path = "mistralai/Mixtral-8x7B-Instruct-v0.1"
    c.batch_size = 64
    c.mesh.fsdp = 2
    c.mesh.expert = 4
    c.lora.r = 8
    c.lora.lora_alpha = 16.0
    return variants.chosen(c, variant, "mixtral_8x7b.json")
