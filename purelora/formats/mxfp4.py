"""Weights that are stored as MXFP4: four bits a value, and one scale for each 32 of them.

    gate_up_proj_blocks   uint8 [E, out, in / 32, 16]    two values a byte, first the low bits
    gate_up_proj_scales   uint8 [E, out, in / 32]        2 ** (scale - 127)

The format is the one of the OCP's specification of microscaling formats, version 1.0: a value is a
sign, two bits of exponent and one of mantissa, and a scale of 255 is not a number. All products are
bfloat16 numbers, so what is read is what the file says, and no rounding of it.
"""

import dataclasses
import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from purelora.core import errors
from purelora.formats import safetensors_file, source

METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES, _BLOCK_VALUES = 16, 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255


@dataclasses.dataclass(frozen=True)
class Packed:
    """A tensor `[E, in, out]` stored as two: MXFP4 blocks and their scales. Made by `find`.

    Attributes:
      name: what it is called without being packed.
      blocks, scales: the files of its parts.
    """

    name: str
    blocks: safetensors_file.File
    scales: safetensors_file.File

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        experts, n_out, n_blocks, _ = self.blocks.entries[self.name + _BLOCKS].shape
        return experts, n_blocks * _BLOCK_VALUES, n_out

    def read(self) -> source.Tensor:
        """The tensor, bfloat16; its digest is that of a file which holds it so."""
        array = np.empty(self.shape, ml_dtypes.bfloat16)
        all_inputs_and_outputs = tuple(slice(0, size) for size in self.shape[1:])
        for expert in range(self.shape[0]):
            array[expert] = self.read_part((slice(expert, expert + 1), *all_inputs_and_outputs))[0]
        return source.Tensor(array, source.digest("BF16", array.shape, array))

    def read_part(self, box: tuple[slice, ...]) -> np.ndarray:
        """The values in `box`, a start and a stop for each dimension of `[E, in, out]`."""
        experts, inputs, outputs = box
        first = inputs.start // _BLOCK_VALUES
        stored = (experts, outputs, slice(first, -(-inputs.stop // _BLOCK_VALUES)))
        blocks = self.blocks.read_codes(self.name + _BLOCKS, (*stored, slice(0, _BLOCK_BYTES)))
        scales = self.scales.read_codes(self.name + _SCALES, stored)
        start = inputs.start - first * _BLOCK_VALUES
        values = dequantised(blocks, scales)[..., start : start + inputs.stop - inputs.start]
        return values.swapaxes(1, 2)


def dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values of `[..., n, 16]` bytes and `[..., n]` scales: `[..., 32 n]` bfloat16."""
    pairs = _PAIRS[scales[..., None].astype(np.uint16) << 8 | blocks]
    return pairs.view(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)


def _pairs() -> np.ndarray:
    """A table of the two bfloat16 values, as bits, for each scale and byte: uint32 `[65536]`."""
    values = np.array([*_MAGNITUDES, *(-size for size in _MAGNITUDES)])
    scales = np.array([math.nan if s == _NAN else 2.0 ** (s - _BIAS) for s in range(256)])
    with np.errstate(over="ignore"):
        table = (scales[:, None] * values).astype(ml_dtypes.bfloat16).view(np.uint16)
    table = table.astype("<u4")
    # By scale, high bits and low bits of a byte; the low ones are of the first value.
    both: np.ndarray = table[:, :, None] << 16 | table[:, None, :]
    return both.reshape(-1)


_PAIRS = _pairs()


def find(shards: Mapping[str, safetensors_file.File]) -> dict[str, Packed]:
    """The tensors of a folder that are stored as MXFP4, by name.

    Args:
      shards: the file of every tensor of a folder, by name.

    Raises:
      ModelError: parts that do not belong together.
    """
    tensors: dict[str, Packed] = {}
    problems = []
    for part, shard in shards.items():
        name = part.removesuffix(_BLOCKS)
        if name == part or name + _SCALES not in shards:
            continue
        packed = Packed(name, shard, shards[name + _SCALES])
        blocks, scales = shard.entries[part], packed.scales.entries[name + _SCALES]
        is_sound = blocks.dtype == scales.dtype == "U8" and len(blocks.shape) == 4
        if not is_sound or blocks.shape != (*scales.shape, _BLOCK_BYTES):
            what = f"is {blocks.dtype} {list(blocks.shape)} with scales {scales.dtype} "
            what += f"{list(scales.shape)}, which is not {METHOD}"
            problems.append(errors.Problem(f"{shard.path}: {part}", None, what, ""))
        tensors[name] = packed
    if problems:
        raise errors.ModelError.of(problems)
    return tensors


def parts(packed: Packed) -> tuple[str, str]:
    """Names of the blocks and of the scales of a tensor."""
    return packed.name + _BLOCKS, packed.name + _SCALES
