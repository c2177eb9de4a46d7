"""The folder of a MaxText checkpoint: where it is, and which parameters it holds.

    <run>/checkpoints/<step>/items         what MaxText's trainers and its converter write
                            /model_params  what its SFT trainer (of Tunix) writes

Either holds arrays in orbax's form, see `array_store`.
"""

import os
import re
from collections.abc import Sequence

from purelora.core import errors
from purelora.formats import array_store

_ITEMS = ("items", "model_params")
_TMP = ".orbax-checkpoint-tmp"
_RANDOM_STATE = {"rngs", "dropout"}
_ADAPTER = re.compile(r"_lora_[ab]$")


def find(path: str) -> str | None:
    """The folder of arrays for a `path`: a run (its newest step), a step, or that folder itself.

    Returns:
      None if `path` is no MaxText checkpoint.

    Raises:
      ModelError: it is one, but writing it was not finished.
    """
    if array_store.is_store(path):
        # A step of purelora has a folder `meta` beside its arrays.
        return None if os.path.isdir(os.path.join(path, os.pardir, "meta")) else path
    if _TMP in os.path.basename(os.path.normpath(path)) and _has_items(path):
        raise _unfinished(path)
    held = _items_of(path)
    if held is not None:
        return held
    inner = os.path.join(path, "checkpoints")
    folder = inner if os.path.isdir(inner) else path
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [name for name in names if name.partition(".")[0].isdecimal()]
    if not any(_has_items(os.path.join(folder, name)) for name in steps):
        return None
    complete = sorted((name for name in steps if name.isdecimal()), key=int)
    newest = os.path.join(folder, complete[-1]) if complete else folder
    held = _items_of(newest)
    if held is None:
        raise _unfinished(newest)
    return held


def _has_items(step: str) -> bool:
    names = os.listdir(step) if os.path.isdir(step) else []
    return any(name.partition(".")[0] in _ITEMS for name in names)


def _items_of(step: str) -> str | None:
    held = [os.path.join(step, name) for name in _ITEMS]
    return next((folder for folder in held if array_store.is_store(folder)), None)


def _unfinished(path: str) -> errors.ModelError:
    what = "holds no complete checkpoint: writing it was not finished"
    return errors.ModelError(path, None, what, "name the folder of a complete step")


def parameters(folder: str) -> dict[str, str]:
    """The parameters in a folder of arrays: from their path in MaxText's model to the stored name.

    The optimiser's moments, the step and the state of random numbers are left out. MaxText's own
    trainers store the parameters under `params`; its SFT trainer stores the NNX model, whose paths
    end in `value`.

    Raises:
      ModelError: the folder is damaged, or holds no model.
    """
    found = array_store.leaves(folder)
    own = {name: keys for name, keys in found.items() if keys[0] == "params"} or found
    paths = {}
    for name, keys in own.items():
        if _RANDOM_STATE & set(keys):
            continue
        while keys[:1] == ("params",):
            keys = keys[1:]
        paths[".".join(keys[:-1] if keys[-1:] == ("value",) else keys)] = name
    if not any(path.startswith(("decoder.", "token_embedder.")) for path in paths):
        what = "holds no parameters of a MaxText model"
        raise errors.ModelError(folder, None, what, "give the folder of a MaxText checkpoint")
    return paths


def is_adapter(path: str) -> bool:
    """Whether the parameter at `path` is a `lora_a` or `lora_b`."""
    return _ADAPTER.search(path) is not None


def is_scanned(folder: str, paths: Sequence[str]) -> bool:
    """Whether the layers are stacked (MaxText's `scan_layers=True`).

    Args:
      folder: the folder, for messages.
      paths: paths of its parameters in MaxText's model.

    Raises:
      ModelError: there are no layers, or some are stacked and some are not.
    """
    stacked = any(
        path.startswith(("decoder.layers.", "decoder.layers_remainder.")) for path in paths
    )
    single = any(re.match(r"decoder\.layers_\d", path) for path in paths)
    if stacked == single:
        what = "holds layers both scanned and not" if stacked else "holds no layers of a decoder"
        raise errors.ModelError(folder, None, what, "is it of a model that purelora knows?")
    return stacked
