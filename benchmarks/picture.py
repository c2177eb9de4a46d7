"""Draws the README's picture from recorded results: the main job's loss, and memory beside others.

    python benchmarks/main_job.py --out=docs/data/main_job.jsonl
    python benchmarks/picture.py

Reads docs/data/main_job.jsonl (what the first command writes) and docs/data/memory.json (which
says under what conditions each figure was measured), and writes docs/picture.svg. Needs matplotlib,
which `pip install -e ".[picture]"` brings.
"""

import argparse
import importlib.util
import json
import pathlib
import tempfile
from typing import Any

from common import runs

DATA = runs.ROOT / "docs" / "data"
OURS, OTHERS, HELD_OUT = "#c2410c", "#94a3b8", "#1d4ed8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=str(runs.ROOT / "docs" / "picture.svg"))
    parser.add_argument("--smoke", action="store_true", help="into a folder that is removed")
    arguments = parser.parse_args()
    losses, memory = read_losses(DATA / "main_job.jsonl"), read_memory(DATA / "memory.json")
    print(f"{len(losses['train'])} steps, {len(memory)} figures of memory")
    if not arguments.smoke:
        draw(losses, memory, arguments.out)
    elif importlib.util.find_spec("matplotlib") is None:
        print("smoke: without matplotlib nothing is drawn")
    else:
        with tempfile.TemporaryDirectory() as folder:
            draw(losses, memory, f"{folder}/picture.svg")


def read_losses(file: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """Pairs of step and loss, of training and of evaluation."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        kind: [(record["step"], record["loss"]) for record in records if record["kind"] == kind]
        for kind in ("train", "eval")
    }


def read_memory(file: pathlib.Path) -> list[tuple[str, float]]:
    """Names and gigabytes, the largest first, those that keep all activations before the others."""
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    rows.sort(key=lambda row: (row["recomputes"], -row["mib"]))
    return [
        (row["library"] + (", recomputing" if row["recomputes"] else ""), row["mib"] * 2**20 / 1e9)
        for row in rows
    ]


def draw(
    losses: dict[str, list[tuple[int, float]]], memory: list[tuple[str, float]], out: str
) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("svg")
    # No date and no random names, so that the same data give the same file.
    matplotlib.rcParams |= {"svg.hashsalt": "purelora", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    left.plot(*zip(*losses["train"], strict=True), color=OURS, label="training rows")
    left.plot(*zip(*losses["eval"], strict=True), "o", color=HELD_OUT, label="held-out rows")
    left.set(xlabel="step", ylabel="loss a token", title="configs/qlora.py: SmolLM2, int8 base")
    left.legend(frameon=False)
    names, sizes = zip(*reversed(memory), strict=True)
    colours = [OURS if name.startswith("purelora") else OTHERS for name in names]
    right.bar_label(right.barh(names, sizes, color=colours), fmt="%.1f", padding=2)
    right.margins(x=0.1)
    right.set(xlabel="GB", title="peak memory of a LoRA step, SmolLM2 in float32")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
