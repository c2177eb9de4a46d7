"""Seconds from the start of the command to its first step, with a cold and a warm compile cache.

    python benchmarks/startup.py

Runs configs/qlora.py to its first step (no eval, no samples; the model is in its cache already)
with an empty compilation cache, and again with the one that this left. Each figure is one run.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from common import runs


def secs_to_first_step(config: str, cache: str, workdir: str) -> float:
    """Seconds from starting the command to the record of its first step."""
    command = [
        sys.executable, "-m", "purelora.train", f"--config={runs.ROOT}/configs/{config}.py",
        "--config.steps=1", "--config.optim.warmup_steps=0", "--config.sample_prompts=()",
        "--config.data.eval_fraction=0", f"--config.workdir={workdir}",
        f"--config.compile_cache={cache}",
    ]  # fmt: skip
    log = pathlib.Path(workdir, "metrics.jsonl")
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not log.exists() or '"kind": "train"' not in log.read_text():
            if process.poll():
                sys.exit(f"the command failed with status {process.returncode}")
            time.sleep(0.02)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="configs/tiny.py")
    smoke = parser.parse_args().smoke
    if smoke:
        runs.begin_smoke()
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(("cold", "warm")):
            secs = secs_to_first_step(
                "tiny" if smoke else "qlora", f"{folder}/cache", f"{folder}/run{number}"
            )
            print(f"{name} cache: {secs:.1f} s to the first step (load {os.getloadavg()[0]:.1f})")


if __name__ == "__main__":
    main()
