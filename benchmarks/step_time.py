"""Time, compile time and peak memory of a LoRA step on SmolLM2's shape.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --cases=float32/none/scan/none,bfloat16/int8/scan/full --steps=6

SmolLM2-135M, LoRA r = 16 on all linear layers, 4 rows of 256 tokens, AdamW, one device. Each case
(dtype / quantised base / scan or unroll / remat) runs in a process of its own, so that peak memory
is its own; the cases run in turn, and each line gives the ratio to the first case of the run.
`naive` is the plainest jitted step of the same model in the same script: unsharded weights, whole
logits, attention by softmax over whole score matrices, everything saved for the backward pass.
"""

import argparse
import functools
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from common import runs

RANK = 16
CASES = [
    "/".join(case)
    for case in itertools.product(
        ("float32", "bfloat16"), ("none", "int8"), ("scan", "unroll"), ("none", "full")
    )
]


SMOKE_CASES = "naive/float32,float32/int8/scan/full"


class Size(NamedTuple):
    """The model, and the shape of a batch."""

    model: str
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


SMOLLM2 = Size("smollm2-135m", 4, 256)
SMOKE = Size("tiny", 2, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(["naive/float32", "naive/bfloat16", *CASES]))
    parser.add_argument("--steps", type=int, default=6, help="timed steps a case")
    parser.add_argument("--smoke", action="store_true", help="two cases of a tiny model, one step")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = SMOLLM2
    if arguments.smoke:
        runs.begin_smoke()
        size = SMOKE
    if arguments.one:
        print(json.dumps(measure(arguments.one, size, arguments.steps)))
        return
    options = [f"--steps={arguments.steps}"]
    if arguments.smoke:
        arguments.cases, options = SMOKE_CASES, ["--steps=1", "--smoke"]
    print(
        f"{'case':34} {'s/step':>7} {'tok/s':>6} {'ratio':>6} {'compile s':>9} {'peak GB':>8} load"
    )
    first = None
    for case in arguments.cases.split(","):
        command = [sys.executable, __file__, f"--one={case}", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{case} failed:\n{done.stderr}")
        r = json.loads(done.stdout.splitlines()[-1])
        first = first or r["secs"]
        print(
            f"{case:34} {r['secs']:7.2f} {size.tokens / r['secs']:6.0f} {first / r['secs']:6.2f} "
            f"{r['compile_secs']:9.1f} {r['peak_gb']:8.2f} {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def measure(case: str, size: Size, steps: int) -> dict[str, float]:
    """Median seconds of a step, compile seconds and peak GB of one case, in this process."""
    import jax

    if case.startswith("naive/"):
        step, state, base, batch = naive(size, case.removeprefix("naive/"))
    else:
        step, state, base, batch = ours(size, *case.split("/"))
    start = time.perf_counter()
    compiled = step.lower(state, base, batch).compile()
    compile_secs = time.perf_counter() - start
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        state, metrics = compiled(state, base, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    secs = statistics.median(times[1:])
    return {"secs": secs, "compile_secs": compile_secs, "peak_gb": peak / 1e9}


def settings(size: Size, dtype: str, qtype: str, scan: str, remat: str):
    """The configuration of a case: configs/qlora.py with the case's keys."""
    keys = {
        "model.path": size.model,
        "dtype": dtype,
        "model.weights_dtype": dtype,
        "quant.qtype": qtype,
        "scan_layers": scan == "scan",
        "remat": remat,
        "batch_size": size.rows,
        "max_length": size.length,
        "lora.r": RANK,
    }
    return runs.settings("qlora", keys)


def ours(size: Size, dtype: str, qtype: str, scan: str, remat: str):
    """purelora's own step with its arguments: the model's weights, full rows of random tokens."""
    import jax

    plan, ready = runs.loaded_step(settings(size, dtype, qtype, scan, remat))
    return *ready, jax.device_put(batch_for(plan, size))


def batch_for(plan, size: Size):
    return runs.full_batch(size.rows, size.length, plan.model.config.vocab_size)


def naive(size: Size, dtype: str):
    """The plainest jitted step of the same model."""
    import jax
    import optax

    from purelora.core import param_info
    from purelora.training import beginning, setup

    model, plan = setup.open_and_plan(settings(size, dtype, "none", "scan", "none"), runs.quiet)
    base = beginning.load_weights(model, plan, runs.quiet).tree
    adapters = param_info.initial_tree(plan.trainable_infos, key=jax.random.key(0))
    tx, loss = optax.adamw(1e-3), naive_loss(plan.model.config, dtype)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, base, batch):
        adapters, opt_state = state
        value, grads = jax.value_and_grad(loss)(adapters, base, batch)
        updates, opt_state = tx.update(grads, opt_state, adapters)
        return (optax.apply_updates(adapters, updates), opt_state), value

    return step, (adapters, tx.init(adapters)), base, batch_for(plan, size)


def naive_loss(cfg, dtype: str):
    """The mean loss of a batch of one micro-batch, as a function of adapters, base and batch."""
    import jax
    import jax.numpy as jnp
    import optax

    from purelora.models import layers

    group = cfg.num_attention_heads // cfg.num_key_value_heads

    def proj(x, w, a):
        y = x @ w["weight"].astype(x.dtype)
        return y + (x @ a["lora_a"].astype(x.dtype)) @ a["lora_b"].astype(x.dtype) * 2

    def norm(x, w):
        x32 = x.astype(jnp.float32)
        y = x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + cfg.rms_norm_eps)
        return (y * w["weight"].astype(jnp.float32)).astype(x.dtype)

    def loss(adapters, base, batch):
        tokens = batch.tokens[0]
        rows, length = tokens.shape
        angles = layers.rope_angles(batch.positions[0], cfg.kinds[0].rope)
        causal = jnp.tril(jnp.ones((length, length), bool))

        def block(x, layer):
            w, a = layer
            attn, lora = w["self_attn"], a["self_attn"]
            h = norm(x, w["input_layernorm"])
            heads = lambda n: proj(h, attn[n], lora[n]).reshape(rows, length, -1, cfg.head_dim)
            q, k = (layers.rope(heads(n), angles) for n in ("q_proj", "k_proj"))
            k, v = (jnp.repeat(t, group, axis=2) for t in (k, heads("v_proj")))
            s = jnp.einsum("btnh,bsnh->bnts", q, k) * cfg.head_dim**-0.5
            p = jax.nn.softmax(jnp.where(causal, s.astype(jnp.float32), -1e30), axis=-1)
            o = jnp.einsum("bnts,bsnh->btnh", p.astype(x.dtype), v)
            x = x + proj(o.reshape(rows, length, -1), attn["o_proj"], lora["o_proj"])
            h = norm(x, w["post_attention_layernorm"])
            mlp, lora = w["mlp"], a["mlp"]
            gate, up = (proj(h, mlp[n], lora[n]) for n in ("gate_proj", "up_proj"))
            return x + proj(jax.nn.silu(gate) * up, mlp["down_proj"], lora["down_proj"]), None

        x = base["embed_tokens"]["weight"][tokens].astype(dtype)
        x, _ = jax.lax.scan(block, x, (base["layers"], adapters["layers"]))
        logits = norm(x, base["norm"]) @ base["embed_tokens"]["weight"].T.astype(dtype)
        nll = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch.targets[0]
        )
        return (nll * batch.weights[0]).mean()

    return loss


if __name__ == "__main__":
    main()
