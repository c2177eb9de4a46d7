"""The main job as a user runs it: wall time, peak memory, and eval loss before and after.

    python benchmarks/main_job.py
    python benchmarks/main_job.py --config=lora

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

from common import runs

KEPT = ("kind", "step", "loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="qlora", help="name of a file in configs/")
    parser.add_argument("--out", help="file to write the losses to, a JSON line each")
    parser.add_argument("--smoke", action="store_true", help="configs/tiny.py, two steps")
    arguments = parser.parse_args()
    changes = []
    if arguments.smoke:
        runs.begin_smoke()
        arguments.config, changes = "tiny", ["--config.steps=2"]
    with tempfile.TemporaryDirectory() as folder:
        config = runs.ROOT / "configs" / f"{arguments.config}.py"
        command = [sys.executable, "-m", "purelora.train", f"--config={config}", *changes]
        start = time.perf_counter()
        subprocess.run([*command, f"--config.workdir={folder}"], check=True)
        secs = time.perf_counter() - start
        text = pathlib.Path(folder, "metrics.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    if arguments.out:
        kept = [{key: r[key] for key in KEPT} for r in records if r["kind"] in ("train", "eval")]
        pathlib.Path(arguments.out).write_text("".join(json.dumps(r) + "\n" for r in kept))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    losses = [r["loss"] for r in records if r["kind"] == "eval"]
    print(
        f"{secs:.0f} s, peak {peak / 1e9:.2f} GB, eval loss {losses[0]:.4f} -> {losses[-1]:.4f} "
        f"({1 - losses[-1] / losses[0]:.0%} lower), load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
