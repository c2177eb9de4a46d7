"""Prints by how many bytes the peak of memory grows while a folder is loaded.

Arguments: the folder, and how it is quantised.
"""

import pathlib
import re
import sys

import jax

from purelora.models import causal_lm
from purelora.ops import quant
from purelora.sharding import specs
from purelora.weights import hf_folder
from purelora.weights import load as weights_load


def peak() -> int:
    """Not ru_maxrss: that one starts with the peak of the process that started this one."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


source = hf_folder.open_folder(sys.argv[1])
model = causal_lm.from_hf(source.config, "folder", dtype="float32")
mesh = specs.make_mesh(1, 1, jax.devices()[:1])
infos = quant.quantised_infos(model.infos, qtype=sys.argv[2], tile_size=None, skip=())
placed = specs.shardings(specs.spec_tree(infos, mesh), mesh)
before = peak()
loaded = weights_load.load(source, model, infos, placed)
print(peak() - before)
