"""Small models side by side: purelora's pretraining and SFT, Tunix's trainer and MaxText's.

    python benchmarks/trainers.py
    python benchmarks/trainers.py --shapes=llama3_1_8b --repeats=5 --peers=

The models of configs/shapes/small: by default Llama 3.1 and Gemma 4 26B made small, embed 128, with
random weights. An int8 base in tiles of 16 (head and embedding stay float), LoRA r = 8 with alpha
16, 8 rows of 128 tokens, AdamW at 1e-3 with clipping to 1, all in float32, on 8 virtual CPU devices
with fsdp = 8. The data are those of configs/base.py, byte by byte: in pretraining every token is a
target, in SFT the answers are. All trainers ("ways") get the same batches. Each library draws its
own random weights, so losses can be compared within a library, and only roughly between them.

    purelora     the run that `python -m purelora.train` sets up: its batches, base and step
    tunix        PeftTrainer's step on Tunix's own model
    maxtext      the step of MaxText's train loop; its LoRA injection is repaired, as 0.2.5 trains
                 nothing without
    maxtext+t    MaxText's SFT trainer, which is PeftTrainer with a model of MaxText

A peer runs where its package is installed (tried with google-tunix 0.1.7 and maxtext 0.2.5, which
need an environment of their own), without its hooks and logs. Each shape has a process of its own,
in which the trainers take turns. A step is timed from its batch on the host to its loss on the
host. Each trainer first takes 8 steps; then each repeat is one step that is not timed and six whose
mean time counts, so the first repeat times steps 10 to 15. Columns of the table:

    loss, balance      of step 15; balance is the load-balancing loss (its coefficient is 0.001), a
                       mean over layers divided by the experts of a token, so that 1 is even
    ms/step            median of the repeats, with the least and the largest
    of first           that median over the one of the first line
    CPU ms             CPU time of all threads, which other work on the machine affects less
    adapters           number of trained parameters. Only purelora adapts single experts; leave them
                       out by --targets for an equal number
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from common import peer_maxtext, peer_tunix, peers, runs

DEVICES, ROWS, LENGTH, RANK, ALPHA, TILE, RATE = 8, 8, 128, 8, 16.0, 16, 1e-3
BEFORE, TIMED, LAST = 8, 6, 15  # Steps before the repeats, timed ones of each; that of the loss.
BALANCE = 1e-3
MODES = ("pretrain", "sft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", default="llama3_1_8b,gemma4_26b", help="of configs/shapes/small"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--remat", choices=("none", "full"), default="none", help="in all libraries"
    )
    parser.add_argument("--targets", default="all-linear", help="purelora's lora.target_modules")
    parser.add_argument("--peers", default="tunix,maxtext,maxtext+t", help="which to run")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--smoke", action="store_true", help="SFT of one shape, without peers")
    arguments = parser.parse_args()
    if arguments.smoke:
        runs.begin_smoke()
        arguments.shapes, arguments.modes = "llama3_1_8b", "sft"
        arguments.repeats, arguments.peers = 1, ""
    shapes = arguments.shapes.split(",")
    if len(shapes) == 1:
        compare(shapes[0], arguments)
        return
    others = [word for word in sys.argv[1:] if not word.startswith("--shapes")]
    for shape in shapes:
        done = subprocess.run([sys.executable, __file__, *others, f"--shapes={shape}"])
        if done.returncode:
            sys.exit(done.returncode)


def compare(shape: str, arguments: argparse.Namespace) -> None:
    """Prints the table of one shape."""
    runs.use_virtual_devices(DEVICES)
    with tempfile.TemporaryDirectory() as folder:
        ways = all_ways(shape, arguments, folder)
        times, outcomes = measure(
            {n: w for n, w in ways.items() if not isinstance(w, str)}, arguments
        )
    print(f"{shape}: {ROWS} rows of {LENGTH} tokens, remat {arguments.remat}, load {load()}")
    print(
        f"{'way':11}{'mode':10}{'scan':6}{'loss':>7}{'balance':>9}{'ms/step':>9}"
        f"{'(least-largest)':>18}{'of first':>10}{'CPU ms':>8}{'tok/s/device':>14}{'adapters':>11}"
    )
    first = statistics.median(secs for secs, _ in next(iter(times.values())))
    for name, way in ways.items():
        head = "{:11}{:10}{:6}".format(*name)
        if isinstance(way, str):
            print(f"{head}{way}")
            continue
        (secs, cpu_secs), (loss, balance) = zip(*times[name], strict=True), outcomes[name][LAST - 1]
        middle, cpu = statistics.median(secs), statistics.median(cpu_secs)
        spread = f"({min(secs) * 1e3:.0f}-{max(secs) * 1e3:.0f})"
        shown = "-" if balance is None else f"{balance:.4f}"
        print(
            f"{head}{loss:7.4f}{shown:>9}{middle * 1e3:9.1f}{spread:>18}"
            f"{middle / first:10.2f}{cpu * 1e3:8.0f}{ROWS * LENGTH / middle / DEVICES:14.0f}"
            f"{way.adapters:11,}"
        )
    for mode in arguments.modes.split(","):
        # The second step is after an update. Later ones drift apart by rounding, and with it the
        # choice of experts: most with Gemma 4's gradients, which agree to 2e-5 at the first step.
        pairs = zip(*(outcomes["purelora", mode, scan][:2] for scan in ("on", "off")), strict=True)
        worst = max(abs(on[0] - off[0]) for on, off in pairs)
        if worst > 1e-3:
            sys.exit(f"{mode}: scan on and off differ by {worst:.1e} in the loss of steps 1 and 2")


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def measure(ways: dict[tuple[str, str, str], peers.Way], arguments: argparse.Namespace):
    """Seconds, and CPU seconds, of a step in each repeat; what each step of each way said."""
    import numpy as np

    outcomes = {name: [way.step() for _ in range(BEFORE)] for name, way in ways.items()}
    times: dict[tuple[str, str, str], list[np.ndarray]] = {name: [] for name in ways}
    for _ in range(arguments.repeats):
        for name, way in ways.items():
            outcomes[name].append(way.step())
            start = np.array([time.perf_counter(), time.process_time()])
            outcomes[name] += [way.step() for _ in range(TIMED)]
            end = np.array([time.perf_counter(), time.process_time()])
            times[name].append((end - start) / TIMED)
    return times, outcomes


def all_ways(shape: str, arguments: argparse.Namespace, folder: str):
    """Every way by name, mode and scan; in place of one that is not there or fails, why."""
    ways: dict[tuple[str, str, str], peers.Way | str] = {}
    feeds = {}
    modes = arguments.modes.split(",")
    count = BEFORE + arguments.repeats * (1 + TIMED)
    for mode in modes:
        for scan in ("on", "off"):
            ways["purelora", mode, scan], feeds[mode] = ours(
                shape, mode, scan, arguments, f"{folder}/{mode}-{scan}", count
            )
    sizes = json.loads(shape_file(shape).read_text())
    task = peers.Task(
        shape, sizes, RANK, ALPHA, TILE, RATE, BALANCE, arguments.remat, DEVICES, LENGTH, folder
    )
    # MaxText before Tunix: it sets options of JAX that would make Tunix compile again.
    order = (
        ("maxtext+t", peer_maxtext.maxtext_on_tunix),
        ("maxtext", peer_maxtext.maxtext),
        ("tunix", peer_tunix.tunix),
    )
    for name, make in order:
        if name not in arguments.peers.split(","):
            continue
        for mode in modes if name != "maxtext+t" else ("sft",):
            for scan in ("on", "off") if name != "tunix" else ("none",):
                ways[name, mode, scan] = peers.tried(
                    functools.partial(make, task, mode, scan == "on", feeds[mode])
                )
    return ways


def shape_file(shape: str) -> pathlib.Path:
    return runs.SHAPES / "small" / f"{shape}.json"


def ours(shape: str, mode: str, scan: str, arguments: argparse.Namespace, folder: str, count: int):
    """A run of purelora, and its first `count` batches."""
    import jax
    import numpy as np

    from purelora.core import trees
    from purelora.sharding import specs
    from purelora.training import feed, setup

    keys = {
        "workdir": folder,
        "task": mode,
        "steps": count,
        "batch_size": ROWS,
        "accum_steps": 1,
        "max_length": LENGTH,
        "dtype": "float32",
        "scan_layers": scan == "on",
        "remat": arguments.remat,
        "compile_cache": None,
        "router_aux_loss_coef": BALANCE if "experts" in shape_file(shape).read_text() else 0.0,
        "model.path": f"random:{shape_file(shape)}",
        "lora.r": RANK,
        "lora.lora_alpha": ALPHA,
        "lora.target_modules": arguments.targets,
        "quant.qtype": "int8",
        "quant.tile_size": TILE,
        "quant.skip": "embed_tokens,lm_head",
        "data.too_long": "truncate",
        "optim.learning_rate": RATE,
        "optim.schedule": "constant",
    }
    model, plan = setup.open_and_plan(runs.settings("base", keys), runs.quiet)
    run, state = setup.build(model, plan, runs.quiet)
    fed = feed.feed(run.data.train, plan.mesh, range(1, count + 1))
    batches = [jax.device_get(one.batch) for one in fed]
    coming = iter(batches)
    placement = specs.shardings(specs.BATCH_SPEC, plan.mesh)
    experts = plan.model.config.experts

    def step() -> tuple[float, float | None]:
        nonlocal state
        state, metrics = run.train_step(state, run.base, jax.device_put(next(coming), placement))
        loss = float(metrics.loss_sum) / float(metrics.weight_sum)
        if experts is None:
            return loss, None
        return loss, float(np.mean(metrics.router.balance_L)) / experts.per_token

    sizes = (np.prod(leaf.shape) for leaf in trees.flatten(plan.trainable_infos).values())
    return peers.Way(step, int(sum(sizes))), batches


if __name__ == "__main__":
    main()
