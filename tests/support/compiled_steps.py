"""Compiled steps as HLO programs, one compilation a process."""

import functools

from purelora.analysis import hlo
from tests.support import tiny
from tests.support.tiny import Case

FSDP = Case("int8", fsdp=8, accum=2)
FSDP_REMAT = Case("int8", fsdp=8, accum=2, remat=True)
KERNELS = {(32, 32), (32, 16), (32, 48), (48, 32)}  # [in, out] of the gathered base kernels.


@functools.cache
def compiled(case: Case) -> hlo.Program:
    trainer = tiny.trainer(case)
    rows = tiny.micro_batches(tiny.flat_batch(), case.accum)
    lowered = trainer.step.lower(trainer.new_state(), trainer.base, rows)
    return hlo.Program.of(lowered.compile().as_text())
