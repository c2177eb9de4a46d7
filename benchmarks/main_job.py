"""The main job as a user runs it: wall time, peak memory, and eval loss before and after.

    python benchmarks/main_job.py
    python benchmarks/main_job.py --config=configs/lora.py

Runs the command of the config in a process of its own and a fresh folder (the model is in its cache
already), shows its output, and prints one line with what it took.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

REPO = pathlib.Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(REPO / "configs" / "qlora.py"))
    config = parser.parse_args().config
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "purelora.train", f"--config={config}"]
        start = time.perf_counter()
        subprocess.run([*command, f"--config.workdir={folder}"], check=True)
        secs = time.perf_counter() - start
        lines = pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    losses = [r["loss"] for r in map(json.loads, lines) if r["kind"] == "eval"]
    print(
        f"{secs:.0f} s, peak {peak / 1e9:.2f} GB, eval loss {losses[0]:.4f} -> {losses[-1]:.4f} "
        f"({1 - losses[-1] / losses[0]:.0%} lower), load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
