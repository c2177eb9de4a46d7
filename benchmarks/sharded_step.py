"""A QLoRA step of a tiny sharded Llama beside a plain step on one device and Tunix's trainer.

    python benchmarks/sharded_step.py
    python benchmarks/sharded_step.py --rounds=3 --steps=5

The shape of Llama 3.1 made small: embed 128, mlp 512, 4 heads and 2 kv heads of 32, 8 layers,
vocab 2048; 8 rows of 128 tokens, int8 base in tiles of 16, LoRA r = 8 on all linear layers, AdamW,
all in float32. Three ways, in one process that sees 8 virtual CPU devices:

    purelora  the run's own step, fsdp = 8
    plain     the same base, adapters, batch and optimiser in the plainest jitted step, one device
    tunix     PeftTrainer's step on its own Llama 3 with qwix, fsdp = 8; only where google-tunix is
              installed (0.1.7 was tried)

They take turns of `steps` steps, so that all of them meet the same machine; a turn's first step is
left out. The time of a step is that until its loss is on the host. The losses of the first two are
compared, so that both are known to do the same work.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import time

from common import runs

DEVICES, ROWS, LENGTH = 8, 8, 128
EMBED, MLP, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 128, 512, 4, 2, 32, 8, 2048
RANK, ALPHA, TILE, THETA, EPS, RATE = 8, 16.0, 16, 500_000.0, 1e-5, 1e-3
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn")
    parser.add_argument("--smoke", action="store_true", help="two steps, without tunix")
    arguments = parser.parse_args()
    if arguments.smoke:
        runs.begin_smoke()
        arguments.rounds, arguments.steps = 1, 2
    runs.use_virtual_devices(DEVICES)
    has_tunix = importlib.util.find_spec("tunix") is not None and not arguments.smoke
    times, losses = measure(arguments.rounds, arguments.steps, has_tunix)
    ours = statistics.median(times["purelora"])
    print(f"{'way':10} {'s/step':>7} {'tok/s':>6} {'of purelora':>11}  {'loss':>6}")
    for way, taken in times.items():
        secs = statistics.median(taken)
        print(
            f"{way:10} {secs:7.3f} {ROWS * LENGTH / secs:6.0f} {secs / ours:11.2f}  "
            f"{losses[way][-1]:6.3f}  ({len(taken)} steps)"
        )
    print(f"load {os.getloadavg()[0]:.1f}")
    worst = max(abs(a - b) for a, b in zip(losses["purelora"], losses["plain"], strict=True))
    if worst > 1e-3:
        sys.exit(f"purelora and plain differ by {worst:.1e} in a step's loss")


def measure(
    rounds: int, steps: int, has_tunix: bool
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of the timed steps of each way, and the losses of all its steps."""
    import jax
    import jax.numpy as jnp

    plan, start = model()
    first = jax.device_put(start, jax.devices()[0])
    # A copy, as each way donates what it trains.
    copied = start._replace(trainable=jax.tree.map(jnp.copy, start.trainable))
    ways = {"purelora": ours(plan, copied), "plain": plain(*first)}
    if has_tunix:
        ways["tunix"] = tunix()
    losses: dict[str, list[float]] = {way: [step() for _ in range(2)] for way, step in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, step in ways.items():
            for number in range(steps):
                start = time.perf_counter()
                losses[way].append(step())
                if number:
                    times[way].append(time.perf_counter() - start)
    return times, losses


def model():
    """The plan of the run, and what it begins with: base and adapters from random numbers."""
    import jax

    from purelora.core import param_info, trees
    from purelora.ops import quant
    from purelora.sharding import specs
    from purelora.training import init, planning

    changes = {
        "batch_size": ROWS,
        "accum_steps": 1,
        "max_length": LENGTH,
        "lora.r": RANK,
        "lora.lora_alpha": ALPHA,
        "quant.tile_size": TILE,
        "quant.skip": "embed_tokens,lm_head",
        "optim.learning_rate": RATE,
        "optim.schedule": "constant",
        "optim.clip_norm": None,
    }
    settings = runs.settings("tiny", changes)
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": EMBED,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
    }
    plan = planning.make_plan(settings, sizes, "config.json", jax.devices())

    def quantised(weight, leaf):
        return weight if isinstance(leaf, param_info.ParamInfo) else quant.quantise(weight, leaf)

    def made(key):
        weights = param_info.initial_tree(plan.model.infos, key=key)
        return trees.map_leaves(quantised, weights, plan.base_infos)

    placed = specs.shardings(plan.base_specs, plan.mesh)
    base = jax.jit(made, out_shardings=placed)(jax.random.key(0))
    return plan, init.start_of(plan, base, initial={}, adapters=None)


def batch():
    """Random tokens, every one a target, no padding."""
    return runs.full_batch(ROWS, LENGTH, VOCAB)


def ours(plan, start):
    """purelora's own step."""
    import jax

    from purelora.sharding import specs

    step, state, base = runs.ready_step(plan, start.base, start.trainable)
    placed = jax.device_put(batch(), specs.shardings(specs.BATCH_SPEC, plan.mesh))

    def run():
        nonlocal state
        state, metrics = step(state, base, placed)
        return float(metrics.loss_sum) / float(metrics.weight_sum)

    return run


def plain(base, adapters):
    """The plainest jitted step: whole weights, scores and logits, nothing of purelora's."""
    import jax
    import optax

    loss, tx = plain_loss(), optax.adamw(RATE, weight_decay=0.0)

    def step(adapters, opt_state, base):
        value, grads = jax.value_and_grad(loss)(adapters, base)
        updates, opt_state = tx.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), opt_state, value

    step = jax.jit(step, donate_argnums=(0, 1))
    carried = (adapters, tx.init(adapters))

    def run():
        nonlocal carried
        *carried, value = step(*carried, base)
        return float(value)

    return run


def plain_loss():
    """The mean loss of the batch as a function of adapters and base."""
    import jax
    import jax.numpy as jnp
    import optax

    tokens, targets = jax.device_put((batch().tokens[0], batch().targets[0]), jax.devices()[0])
    angles = jnp.arange(LENGTH)[:, None] * THETA ** -(jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    def linear(x, weight, adapter):
        codes, scale = weight["weight"].qvalue, weight["weight"].scale
        whole = codes * jnp.repeat(scale, TILE, axis=0)
        return x @ whole + (x @ adapter["lora_a"]) @ adapter["lora_b"] * (ALPHA / RANK)

    def norm(x, weight):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * weight["weight"]

    def rotated(x):
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        left, right = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    def block(x, layer):
        weights, adapters = layer
        w, a = weights["self_attn"], adapters["self_attn"]
        h = norm(x, weights["input_layernorm"])
        q, k, v = (
            linear(h, w[n], a[n]).reshape(ROWS, LENGTH, -1, HEAD_DIM)
            for n in ("q_proj", "k_proj", "v_proj")
        )
        k, v = (jnp.repeat(t, HEADS // KV_HEADS, axis=2) for t in (rotated(k), v))
        scores = jnp.einsum("btnh,bsnh->bnts", rotated(q), k) * HEAD_DIM**-0.5
        shares = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        mixed = jnp.einsum("bnts,bsnh->btnh", shares, v).reshape(ROWS, LENGTH, -1)
        x = x + linear(mixed, w["o_proj"], a["o_proj"])
        h = norm(x, weights["post_attention_layernorm"])
        w, a = weights["mlp"], adapters["mlp"]
        gate, up = (linear(h, w[n], a[n]) for n in ("gate_proj", "up_proj"))
        return x + linear(jax.nn.silu(gate) * up, w["down_proj"], a["down_proj"]), None

    def loss(adapters, base):
        x = base["embed_tokens"]["weight"][tokens]
        x, _ = jax.lax.scan(block, x, (base["layers"], adapters["layers"]))
        logits = norm(x, base["norm"]) @ base["lm_head"]["weight"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return loss


def tunix():
    """Tunix's train step as `PeftTrainer.train` calls it, without its hooks and logs."""
    import jax
    import numpy as np
    import optax
    from tunix.sft import peft_trainer

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(DEVICES, 1), ("fsdp", "tp"))
    settings = peft_trainer.TrainingConfig(eval_every_n_steps=10**6, max_steps=10**6)
    ids = batch().tokens[0]
    rows = {
        "input_tokens": ids,
        "input_mask": np.ones(ids.shape, bool),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "attention_mask": np.tile(np.tril(np.ones((LENGTH, LENGTH), bool)), (ROWS, 1, 1)),
    }
    placement = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    adapted = tunix_model(mesh)
    with mesh:
        trainer = peft_trainer.PeftTrainer(adapted, optax.adamw(RATE, weight_decay=0.0), settings)
        step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
        rows = jax.device_put(rows, placement)

    def run():
        with mesh:
            value, *_ = step(rows)
        return float(value)

    return run


def tunix_model(mesh):
    """Tunix's Llama 3 with qwix's adapters and quantised base, on the devices of the mesh."""
    import jax
    import qwix
    from flax import nnx
    from tunix.models.llama3 import model as llama3

    sizes = llama3.ModelConfig(
        num_layers=LAYERS,
        vocab_size=VOCAB,
        embed_dim=EMBED,
        hidden_dim=MLP,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rope_theta=int(THETA),
        norm_eps=EPS,
    )
    rules = qwix.LoraProvider(
        module_path="|".join(f".*{name}" for name in LINEARS),
        rank=RANK,
        alpha=ALPHA,
        weight_qtype="int8",
        tile_size=TILE,
    )

    def placed(module):
        leaves = nnx.state(module)
        nnx.update(module, jax.lax.with_sharding_constraint(leaves, nnx.get_partition_spec(leaves)))
        return module

    with mesh:
        whole = nnx.jit(lambda: placed(llama3.Llama3(sizes, rngs=nnx.Rngs(0))))()
    example = whole.get_model_input()
    adapted = qwix.apply_lora_to_model(whole, rules, rngs=nnx.Rngs(1), **example)
    with mesh:
        return placed(adapted)


if __name__ == "__main__":
    main()
