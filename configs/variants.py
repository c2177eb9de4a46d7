"""The variants of a config for a large model: `CONFIG.py:small` is the same run in a minute."""

import pathlib

from ml_collections import config_dict

# Files with the shapes of models, in the form of a config.json.
SHAPES = pathlib.Path(__file__).parent / "shapes"


def chosen(c: config_dict.ConfigDict, variant: str, shape: str) -> config_dict.ConfigDict:
    """The config `c` itself ("full"), or the same run with a small model, in a minute ("small").

    Args:
      c: the config of the large model; changed in place.
      variant: "full" or "small".
      shape: the small model's config.json, a file in configs/shapes/small with all features of the
        large one's. Its weights are random.

    Raises:
      ValueError: another variant.
    """
    if variant == "full":
        return c
    if variant != "small":
        raise ValueError(f"no variant {variant!r}: there are full and small")
    c.workdir += "_small"
    c.model.path = f"random:{SHAPES / 'small' / shape}"
    c.epochs, c.steps = None, 4
    c.batch_size, c.accum_steps, c.max_length = 16, 2, 128
    c.mesh.data, c.mesh.fsdp, c.mesh.expert, c.mesh.tensor = 1, None, 1, 1
    c.data.eval_fraction, c.data.too_long = 0.02, "truncate"
    c.optim.warmup_steps = 1
    if c.quant.tile_size is not None:
        c.quant.tile_size = 16  # Tiles of 128 inputs that eight devices can share.
    return c
