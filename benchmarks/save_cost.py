"""What saving every step costs: the time of a step without, in the background, and waited for.

    python benchmarks/save_cost.py
    python benchmarks/save_cost.py --config=tiny --rounds=3 --steps=4

configs/qlora.py (SmolLM2-135M, int8 base, LoRA r = 16, 4 rows of 256 tokens), one device, one
process: its train step and its checkpoints, without eval and records. The three ways take turns of
`steps` steps, so that all of them meet the same machine; a turn's first step is left out, as it may
still share the machine with the save before it. The time of a step is that until its metrics are on
the host, and with a save that of handing it over.
"""

import argparse
import contextlib
import os
import pathlib
import statistics
import tempfile
import time

from common import runs

WAYS = ("no save", "in background", "waited for")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="qlora", help="name of a file in configs/")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each way")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--smoke", action="store_true", help="configs/tiny.py, two steps a way")
    arguments = parser.parse_args()
    if arguments.smoke:
        runs.begin_smoke()
        arguments.config, arguments.rounds, arguments.steps = "tiny", 1, 1
    with tempfile.TemporaryDirectory() as folder:
        times = measure(arguments.config, folder, arguments.rounds, arguments.steps)
    plain = statistics.median(times["no save"])
    for way in WAYS:
        secs = statistics.median(times[way])
        print(f"{way:14} {secs:7.3f} s/step  {secs / plain - 1:+7.1%}  ({len(times[way])} steps)")
    print(f"load {os.getloadavg()[0]:.1f}")


def measure(config: str, folder: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of the steps of each way."""
    import numpy as np

    from purelora.checkpoint import retention, store
    from purelora.training import feed, setup

    settings = runs.settings(config, {"workdir": f"{folder}/run"})
    model, plan = setup.open_and_plan(settings, runs.quiet)
    run, state = setup.build(model, plan, runs.quiet)
    policy = retention.Policy(last=2, every=None, best=False)
    saving = {
        "in background": store.Checkpoints(pathlib.Path(folder, "a"), policy, in_background=True),
        "waited for": store.Checkpoints(pathlib.Path(folder, "b"), policy, in_background=False),
    }
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    number = 0
    for _ in range(rounds):
        for way in WAYS:
            for index in range(steps + 1):
                number += 1
                start = time.perf_counter()
                batch = next(feed.feed(run.data.train, plan.mesh, [number])).batch
                state, metrics = run.train_step(state, run.base, batch)
                np.asarray(metrics.grad_norm)
                if way in saving:
                    saving[way].save(number, state, run.meta)
                if index:
                    times[way].append(time.perf_counter() - start)
            for one in saving.values():
                one.wait()
    for one in (*saving.values(), run.checkpoints):
        with contextlib.closing(one):
            pass
    return times


if __name__ == "__main__":
    main()
