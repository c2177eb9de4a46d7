"""Writes the adapter of a run as a PEFT folder, and checks what was written.

    python -m purelora.export --run=runs/qlora --output=adapters/qlora

--run=PATH        a run (its newest whole step), or the folder of one step
--output=PATH     a new folder; PEFT, and whatever reads PEFT's adapters, loads it
--model=PATH      the base, if it is no longer where the run found it
--hf-folder=PATH  for such a base that is a MaxText checkpoint: where its config.json is

The folder is read back, put on the base anew and must give the run's own logits; otherwise it is
removed again. An adapter that began out of the weights (pissa, olora, loftq) is written for the
original base, with twice the rank; there the run's base is another one, so the update that the
folder makes to each weight is compared with what training added to it.
"""

import dataclasses
from collections.abc import Sequence

from purelora.config import command_line
from purelora.core import errors
from purelora.training import adapter_export


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    run: str
    output: str
    model: str | None = None
    hf_folder: str | None = None


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options = command_line.options(Options, argv)
    if options.hf_folder is not None and options.model is None:
        what = "has no effect without --model"
        raise errors.ConfigError("--hf-folder", options.hf_folder, what, "leave it out")
    base = None if options.model is None else adapter_export.Base(options.model, options.hf_folder)
    step, difference = adapter_export.export(options.run, options.output, base=base)
    print(f"{options.output}: adapter of step {step}, read back: {difference}")
    return 0
