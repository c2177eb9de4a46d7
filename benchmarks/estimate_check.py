"""Estimates beside the compiler's memory analysis and the memory that a process really takes.

    python benchmarks/estimate_check.py
    python benchmarks/estimate_check.py --cases=1b/int8/full --steps=3

Each case (model / quantised base / remat) runs in processes of its own, one device each. `compiled`
and `formula` are the two methods of purelora.estimate (the formula from steps of 4 and 8 layers),
`analysis` is what the compiled step that is run here says of itself, and `measured` is how far the
process's largest resident memory during the steps lies above what it was after imports and
compilation, before the first weight was made. Weights are constants: memory does not see values.
The 1B model is Llama 3.2's shape with 4 rows of 128 tokens, SmolLM2-135M has 4 rows of 256.
"""

import argparse
import ctypes
import gc
import json
import os
import pathlib
import subprocess
import sys

from common import runs

MODELS = {
    "smollm2": ("smollm2-135m", 256),
    "1b": (str(runs.SHAPES / "llama3_2_1b.json"), 128),
    "small": (str(runs.SHAPES / "small" / "llama3_1_8b.json"), 32),
}
CASES = ("smollm2/int8/none", "smollm2/int8/full", "1b/int8/none", "1b/int8/full", "1b/nf4/full")
DEPTHS = (4, 8)
SMOKE_CASES = "small/int8/none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=3, help="steps a case")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="a small model, one step")
    arguments = parser.parse_args()
    if arguments.smoke:
        runs.begin_smoke()
        arguments.cases, arguments.steps = SMOKE_CASES, 1
    if arguments.one:
        method, case = arguments.one
        result = measured(case, arguments.steps) if method == "measured" else estimated(case)
        print(json.dumps(result))
        return
    columns = ("compiled", "formula", "analysis", "measured")
    print(f"{'case':20}" + "".join(f"{name + ' MB':>13}" for name in columns), end="")
    print(f"{'comp/anal':>10}{'form/anal':>10}{'comp/meas':>10}{'whole MB':>10}")
    for case in arguments.cases.split(","):
        r = {**child("estimated", case, arguments), **child("measured", case, arguments)}
        print(f"{case:20}" + "".join(f"{r[name] / 1e6:13,.1f}" for name in columns), end="")
        ratios = (
            r[a] / r[b]
            for a, b in (
                ("compiled", "analysis"),
                ("formula", "analysis"),
                ("compiled", "measured"),
            )
        )
        print("".join(f"{ratio:10.3f}" for ratio in ratios) + f"{r['whole'] / 1e6:10,.0f}")


def child(method: str, case: str, arguments: argparse.Namespace) -> dict[str, float]:
    """The result of one process."""
    command = [sys.executable, __file__, "--one", method, case, f"--steps={arguments.steps}"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def settings(case: str):
    """The configuration of a case: configs/qlora.py with the case's keys."""
    model, qtype, remat = case.split("/")
    path, length = MODELS[model]
    keys = {
        "model.path": path,
        "max_length": length,
        "quant.qtype": qtype,
        "quant.tile_size": 64 if qtype == "nf4" else None,
        "remat": remat,
    }
    return runs.settings("qlora", keys)


def estimated(case: str) -> dict[str, float]:
    """Peak bytes by both methods."""
    import jax

    from purelora.analysis import footprint
    from purelora.interop import open_model
    from purelora.training import planning

    c = settings(case)
    hf_config = open_model.open_config(c.model.path)
    devices = jax.devices()[:1]
    compiled = footprint.compiled(planning.make_plan(c, hf_config, c.model.path, devices))
    formula = footprint.formula(c, hf_config, c.model.path, devices, DEPTHS)
    return {"compiled": compiled.peak_bytes, "formula": formula.peak_bytes}


def measured(case: str, steps: int) -> dict[str, float]:
    """Bytes by the compiler's analysis and by the operating system, for some real steps."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from purelora.interop import open_model
    from purelora.training import planning

    c = settings(case)
    p = planning.make_plan(c, open_model.open_config(c.model.path), c.model.path, jax.devices()[:1])
    abstract = runs.abstract_step(p)
    arguments = abstract.arguments
    step = abstract.lower().compile()
    analysis = step.memory_analysis()
    new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    total = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + new

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory()["VmRSS"]
    reset_peak()

    def constants(tree):
        return jax.jit(lambda: jax.tree.map(lambda a: jnp.full(a.shape, 0.01, a.dtype), tree))()

    base = constants(arguments.base)
    state = runs.ready_step(p, base, constants(arguments.state.trainable)).state
    batch = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), arguments.batch)
    for _ in range(steps):
        state, metrics = step(state, base, batch)
        jax.block_until_ready((state, metrics))
    peak = memory()["VmHWM"]
    return {"analysis": total, "measured": peak - before, "whole": peak}


def memory() -> dict[str, int]:
    """The sizes of this process in bytes, as /proc gives them."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    fields = (line.split() for line in lines if line.startswith("Vm"))
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, *_ in fields}


def reset_peak() -> None:
    """Sets VmHWM back to what is resident now."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
