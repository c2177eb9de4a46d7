"""Compile time of the train step with layers scanned and unrolled, at 8, 32 and 64 layers.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --shapes=llama3_1_8b --unrolled=8,32,64 --repeats=1

The models of configs/shapes/small with so many layers: an int8 base, LoRA r = 8 on all linear
layers, 8 rows of 128 tokens, fsdp = 8 on virtual CPU devices. What is compiled is the step that
`python -m purelora.train` compiles, from shapes alone, so that no weights are made; without a
compilation cache, and with JAX's own caches cleared each time. Numbers of layers take turns, and
each figure is the median of the repeats. `trace` is from Python to StableHLO, `compile` is XLA's
part; beside them the instructions of the compiled program and the kilobytes of the StableHLO, which
do not depend on the machine. The last lines give 64 layers over 8: with scan the seconds should not
grow by more than a fifth, and it is an error if the instructions do. Unrolled, 64 layers take
minutes and are left out unless asked for.
"""

import argparse
import os
import statistics
import sys
import time
from typing import NamedTuple

from common import runs

DEVICES, LENGTH, RANK = 8, 128, 8
LIMIT = 1.2


class Cost(NamedTuple):
    """What one compilation costs; see the module's docstring."""

    trace_secs: float
    compile_secs: float
    instructions: int
    stablehlo_kb: float

    @property
    def secs(self) -> float:
        return self.trace_secs + self.compile_secs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="llama3_1_8b,mixtral_8x7b,gemma4_26b")
    parser.add_argument("--scanned", default="8,32,64", help="numbers of layers with scan")
    parser.add_argument("--unrolled", default="8,32", help="numbers of layers without")
    parser.add_argument("--repeats", type=int, default=3, help="with scan; once without")
    parser.add_argument("--smoke", action="store_true", help="one shape of 2 and of 3 layers, once")
    arguments = parser.parse_args()
    if arguments.smoke:
        runs.begin_smoke()
        arguments.shapes, arguments.scanned, arguments.unrolled = "llama3_1_8b", "2,3", "2"
        arguments.repeats = 1
    runs.use_virtual_devices(DEVICES)
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    print(
        f"{'shape':14}{'scan':5}{'layers':>7}{'trace s':>9}{'compile s':>11}{'instructions':>14}"
        f"{'StableHLO kB':>14}  load"
    )
    wrong = [
        word
        for shape in arguments.shapes.split(",")
        for scan, layers, repeats in (
            (True, arguments.scanned, arguments.repeats), (False, arguments.unrolled, 1),
        )
        for word in compared(shape, scan, [int(n) for n in layers.split(",") if n], repeats)
    ]  # fmt: skip
    if wrong:
        sys.exit("\n".join(wrong))


def compared(shape: str, scan: bool, layers: list[int], repeats: int) -> list[str]:
    """Prints a line for each number of layers and one of ratios; returns what is wrong, if any."""
    steps = {number: lowering(shape, scan, number) for number in layers}
    # The first compilation of a process also pays for imports and initialisation: not counted.
    compiled(lowering(shape, scan, 2))
    taken: dict[int, list[Cost]] = {number: [] for number in layers}
    for _ in range(repeats):
        for number, step in steps.items():
            taken[number].append(compiled(step))
    costs = {}
    for number, found in taken.items():
        cost = costs[number] = Cost(
            *(statistics.median(column) for column in zip(*found, strict=True))
        )
        print(
            f"{shape:14}{'on' if scan else 'off':5}{number:7}{cost.trace_secs:9.2f}"
            f"{cost.compile_secs:11.2f}{cost.instructions:14,.0f}{cost.stablehlo_kb:14,.0f}"
            f"  {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    if len(layers) < 2:
        return []
    few, many = costs[layers[0]], costs[layers[-1]]
    growth = many.instructions / few.instructions
    print(
        f"{'':14}{layers[-1]} layers over {layers[0]}: seconds {many.secs / few.secs:.2f}, "
        f"instructions {growth:.2f}, StableHLO {many.stablehlo_kb / few.stablehlo_kb:.2f}"
    )
    if scan and growth > LIMIT:
        return [f"{shape}: with scan the program grows to {growth:.2f} times"]
    return []


def lowering(shape: str, scan: bool, layers: int):
    """The step of a run with so many layers: a function that traces and lowers it anew."""
    import jax

    from purelora.training import planning

    path = runs.SHAPES / "small" / f"{shape}.json"
    keys = {
        "steps": 100,
        "batch_size": DEVICES,
        "max_length": LENGTH,
        "dtype": "float32",
        "scan_layers": scan,
        "model.path": f"random:{path}",
        "lora.r": RANK,
        "quant.qtype": "int8",
        "quant.tile_size": 16,
    }
    settings = runs.settings("base", keys)
    plan = planning.make_plan(settings, runs.sizes(path, layers), str(path), jax.devices())
    return lambda: runs.abstract_step(plan).lower()


def compiled(lower) -> Cost:
    """Traces, lowers and compiles a step, cold."""
    import jax

    from purelora.analysis import hlo

    jax.clear_caches()
    start = time.perf_counter()
    lowered = lower()
    traced = time.perf_counter()
    program = lowered.compile()
    done = time.perf_counter()
    found = hlo.Program.of(program.as_text())
    return Cost(
        trace_secs=traced - start,
        compile_secs=done - traced,
        instructions=sum(map(len, found.computations.values())),
        stablehlo_kb=len(lowered.as_text()) / 1e3,
    )


if __name__ == "__main__":
    main()
