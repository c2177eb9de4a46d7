"""Tokens a second of greedy generation, against transformers' `generate` where it is installed.

    python benchmarks/generation.py
    python benchmarks/generation.py --batches=1 --qtype=int8 --dtype=bfloat16 --rounds=7

SmolLM2-135M, prompts of 32 tokens, 64 new tokens each, whatever they are (no end token). Both take
turns in one process; the figures are medians over the rounds, and the last column is the system's
load meanwhile. transformers gets the same float32 weights, as read from the GGUF file, and as many
threads as the process may use cores. The rate counts all new tokens and all time, that of the
prompt included.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping

PROMPT = (
    "The history of the printing press begins in the fifteenth century, when a goldsmith from "
    "Mainz found out how to cast letters of metal that could be used again and again, and"
)
PROMPT_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", default="1,8", help="rows that run together")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", help="of ours alone")
    parser.add_argument("--qtype", default="none", help="of ours alone")
    parser.add_argument("--tile-size", type=int, default=None)
    parser.add_argument("--smoke", action="store_true", help="the tiny model, ours alone")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.batches = "tiny", "2"
        arguments.new_tokens, arguments.rounds = 4, 1
    runs, ids = candidates(arguments)
    print(f"{'':14} {'rows':>4} {'tok/s':>7} {'ratio':>6} {'ms/token':>9} load")
    for rows in map(int, arguments.batches.split(",")):
        measured = measure(runs, [ids] * rows, arguments.new_tokens, arguments.rounds)
        for name, secs in measured.items():
            rate = rows * arguments.new_tokens / secs
            ratio = measured["purelora"] / secs
            step = secs / arguments.new_tokens * 1e3
            load = os.getloadavg()[0]
            print(f"{name:14} {rows:4} {rate:7.1f} {ratio:6.2f} {step:9.1f} {load:.1f}", flush=True)


Generate = Callable[[list[list[int]], int], None]


def candidates(arguments: argparse.Namespace) -> tuple[dict[str, Generate], list[int]]:
    """What is compared, and the prompt's tokens."""
    from purelora.inference import loaded_model
    from purelora.interop import builtin
    from purelora.models import decode

    options = loaded_model.ModelOptions(
        model=arguments.model,
        dtype=arguments.dtype,
        qtype=arguments.qtype,
        tile_size=arguments.tile_size,
    )
    loaded = loaded_model.load_model(options, {})
    variant = loaded.variant(loaded_model.BASE)
    ids = loaded.ids(PROMPT, where="prompt", max_new_tokens=arguments.new_tokens)[:PROMPT_TOKENS]

    def ours(prompts: list[list[int]], new_tokens: int) -> None:
        decode.complete(
            variant.model,
            variant.trainable,
            variant.base,
            prompts,
            end_ids=(),
            max_new_tokens=new_tokens,
            dtype=loaded.dtype,
        )

    runs: dict[str, Generate] = {"purelora": ours}
    if arguments.smoke:
        print("smoke: without transformers")
        return runs, ids
    try:
        runs["transformers"] = by_transformers(builtin.open_model(arguments.model).source)
    except ImportError:
        print("transformers or torch is not installed: without comparison")
    return runs, ids


def by_transformers(source: object) -> Generate:
    """`LlamaForCausalLM.generate` with the weights of a source."""
    import numpy as np
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    known = {k: v for k, v in source.config.items() if k != "architectures"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**known)).eval()
    model.generation_config.eos_token_id = None
    weights = {
        name: torch.from_numpy(np.array(source.read(name).array, np.float32))
        for name in source.shapes()
    }
    missing, surplus = model.load_state_dict(weights, strict=False)
    assert not surplus and set(missing) <= {"lm_head.weight"}
    model.tie_weights()

    def theirs(prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert out.shape[1] == len(prompts[0]) + new_tokens

    return theirs


def measure(
    runs: Mapping[str, Generate], prompts: list[list[int]], new_tokens: int, rounds: int
) -> dict[str, float]:
    """Median seconds of each, taken in turn after one call that compiles."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run(prompts, new_tokens)
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


if __name__ == "__main__":
    main()
