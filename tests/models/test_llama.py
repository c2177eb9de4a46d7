"""Llama: the logits of transformers and of an independent model, and what must not change them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purelora.core import errors, trees
from purelora.core.batch import Batch, Inputs
from purelora.interop import builtin
from purelora.models import causal_lm, kv_cache, objective
from purelora.sharding import parallel
from tests.support import plain, tiny

VARIANTS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "biases, no groups": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None},
    "one kv head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 16},
}
SCALED = {
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


@pytest.fixture(scope="module")
def adapted():
    """A model with adapters on all matrices, the head too; its base, adapters and hidden()."""
    m = tiny.with_lora(tiny.model(), r".*(proj|lm_head)")
    return m, tiny.weights(m), tiny.adapters(m)


def hidden(m, base, trainable, inputs, *, scan=True, remat=False):
    return m.hidden(
        m.bind(base, trainable), inputs, dtype=jnp.float32, scan_layers=scan, remat=remat
    )[0]


@pytest.fixture(scope="module")
def logits(adapted):
    """Compiled logits of the adapted model, for [2, T] inputs."""
    m, _, _ = adapted
    return jax.jit(lambda base, trainable, inputs: m.logits(trainable, base, inputs))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_the_plain_model(name):
    m = tiny.model(**VARIANTS[name])
    base, tokens = tiny.weights(m), tiny.tokens(2, 9)
    got = jax.jit(lambda b, i: m.logits({}, b, i))(base, tiny.inputs(tokens))
    config, flat = tiny.hf_config(**VARIANTS[name]), trees.flatten(base)
    want = jax.jit(jax.vmap(lambda t: plain.logits(flat, t, config)))(jnp.asarray(tokens))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.reference
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [*VARIANTS, *SCALED])
def test_logits_of_transformers(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    changes = (VARIANTS | SCALED)[name] | {"max_position_embeddings": 64}
    config = tiny.hf_config(**changes)
    m = tiny.model(**changes)
    base = tiny.weights(m)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    missing = theirs.load_state_dict(hf_weights(m, base, torch), strict=False).missing_keys
    assert missing == (["lm_head.weight"] if m.config.tie_word_embeddings else [])
    theirs.tie_weights()
    tokens = tiny.tokens(2, 16)
    with torch.no_grad():
        want = theirs(torch.tensor(tokens).long()).logits.numpy()
    got = jax.jit(lambda b, i: m.logits({}, b, i))(base, tiny.inputs(tokens))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def hf_weights(m: causal_lm.CausalLM, base, torch):
    """The base by Hugging Face's names; kernels are [out, in] there."""
    found = {}
    for path, array in trees.flatten(base).items():
        names = m.hf_names[path]
        for name, value in zip(names, array if len(names) > 1 else [array], strict=True):
            is_kernel = path.endswith("proj.weight")
            found[name] = torch.tensor(
                np.asarray(value).T.copy() if is_kernel else np.asarray(value).copy()
            )
    return found


def test_adapted_is_merged(adapted, logits):
    """The plain model with adapters merged into its weights; also with a head of its own."""
    tokens = tiny.tokens(2, 9)
    for m, run in ((adapted[0], logits), (untied_with_head(), None)):
        base, adapters = tiny.weights(m), tiny.adapters(m)
        run = run or jax.jit(lambda b, t, i, m=m: m.logits(t, b, i))
        got = run(base, adapters, tiny.inputs(tokens))
        flat = plain.merged(trees.flatten(base), adapters, 2.0)
        config = tiny.hf_config()
        want = jax.jit(jax.vmap(lambda t, f=flat, c=config: plain.logits(f, t, c)))(
            jnp.asarray(tokens)
        )
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def untied_with_head() -> causal_lm.CausalLM:
    return tiny.with_lora(tiny.model(tie_word_embeddings=False), ["q_proj", "lm_head"])


def test_fresh_adapters_change_nothing(adapted, logits):
    m, base, _ = adapted
    inputs = tiny.inputs(tiny.tokens(2, 9))
    bare = jax.jit(lambda b, i: tiny.model().logits({}, b, i))(base, inputs)
    np.testing.assert_array_equal(logits(base, tiny.adapters(m, fresh=True), inputs), bare)


def test_every_layers_lora_b_changes_the_logits(adapted, logits):
    m, base, _ = adapted
    fresh, inputs = tiny.adapters(m, fresh=True), tiny.inputs(tiny.tokens(2, 9))
    bare = logits(base, fresh, inputs)
    flat = trees.flatten(fresh)
    for path, leaf in flat.items():
        for layer in range(tiny.LAYERS if path.startswith("layers.") else 1):
            where = (layer,) if path.startswith("layers.") else ()
            if path.endswith("lora_b"):
                moved = trees.unflatten(flat | {path: leaf.at[where].add(0.1)})
                assert np.abs(logits(base, moved, inputs) - bare).max() > 1e-3, (path, layer)


def test_scan_and_remat_change_nothing(adapted):
    """Values and gradients: scanned = unrolled, remat = none."""
    m, base, trainable = adapted
    inputs = tiny.inputs(tiny.tokens(2, 9))

    def loss(adapters, scan, remat):
        x_BTD = hidden(m, base, adapters, inputs, scan=scan, remat=remat)
        return jnp.mean(jnp.sin(x_BTD) + 1)

    run = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    want, grads = run(trainable, True, False)
    for scan, remat in ((False, False), (True, True), (False, True)):
        got, other = run(trainable, scan, remat)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        chex.assert_trees_all_close(other, grads, rtol=0, atol=1e-6)


def test_jit_is_eager(adapted, logits):
    m, base, trainable = adapted
    inputs = tiny.inputs(tiny.tokens(2, 9))
    eager = m.logits(trainable, base, inputs, scan_layers=False)
    np.testing.assert_allclose(logits(base, trainable, inputs), eager, rtol=0, atol=1e-5)


def test_bfloat16_is_near_float32(adapted, logits):
    m, base, trainable = adapted
    inputs = tiny.inputs(tiny.tokens(2, 9))
    want = logits(base, trainable, inputs)
    got = jax.jit(lambda b, t, i: m.logits(t, b, i, dtype=jnp.bfloat16))(base, trainable, inputs)
    assert got.dtype == jnp.bfloat16
    assert np.abs(got.astype(jnp.float32) - want).max() < 0.05 * np.abs(want).max()


def test_causality(adapted, logits):
    _, base, trainable = adapted
    tokens = tiny.tokens(2, 9)
    before = logits(base, trainable, tiny.inputs(tokens))
    changed = tokens.copy()  # The array itself may be read until `before` is computed.
    changed[:, 5] = (tokens[:, 5] + 1) % tiny.VOCAB
    after = logits(base, trainable, tiny.inputs(changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.abs(before[:, 5:] - after[:, 5:]).max(axis=(0, 2)) > 1e-3).all()


# Row 0 holds a = 1 2 3 and b = 4 ... 8, then padding; row 1 holds b alone, then padding.
PACKED = Inputs(
    jnp.array([[1, 2, 3, 4, 5, 6, 7, 8, 0], [4, 5, 6, 7, 8, 0, 0, 0, 0]]),
    jnp.array([[0, 1, 2, 0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 0, 0, 0, 0]]),
    jnp.array([[1, 1, 1, 2, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0]]),
)


def test_packed_is_separate(adapted, logits):
    """Neither the records beside it nor its place in the row bend a record."""
    _, base, trainable = adapted
    row, alone = logits(base, trainable, PACKED)
    np.testing.assert_allclose(row[3:8], alone[:5], rtol=0, atol=1e-5)
    tokens = PACKED.tokens_BT.at[0, :3].set(jnp.array([9, 9, 11]))
    changed = logits(base, trainable, PACKED._replace(tokens_BT=tokens))
    np.testing.assert_array_equal(changed[0, 3:8], row[3:8])
    assert np.abs(changed[0, :3] - row[:3]).max() > 1e-3
    padding = PACKED.tokens_BT.at[0, 8].set(17)
    changed = logits(base, trainable, PACKED._replace(tokens_BT=padding))
    np.testing.assert_array_equal(changed[0, :8], row[:8])


def test_packed_loss_is_the_sum_of_the_records(adapted):
    m, base, trainable = adapted
    targets = jnp.array([[2, 3, 0, 5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 0, 0, 0, 0, 0]])
    weights = (targets > 0).astype(jnp.float32)
    batch = Batch(PACKED.tokens_BT, targets, weights, *PACKED[:0:-1])
    run = objective.Execution(jnp.float32, True, False, 4)

    def loss(w):
        one = batch._replace(weights=w)
        return objective.losses(
            m,
            trainable,
            base,
            one,
            execution=run,
            shards=parallel.NO_SHARDS,
            dropout=None,
            pool_router=False,
        ).xent

    flat, config = plain.merged(trees.flatten(base), trainable, 2.0), tiny.hf_config()
    record = jax.jit(lambda *row: plain.loss_sum(flat, *row, config))
    a = record([[1, 2, 3, 0, 0]], [[2, 3, 0, 0, 0]], [[1.0, 1.0, 0.0, 0.0, 0.0]])
    b = record([[4, 5, 6, 7, 8]], [[5, 6, 7, 8, 0]], [[1.0, 1.0, 1.0, 1.0, 0.0]])
    compiled = jax.jit(loss)
    np.testing.assert_allclose(compiled(weights.at[1].set(0)), a + b, rtol=1e-5)
    np.testing.assert_allclose(compiled(weights), a + 2 * b, rtol=1e-5)


def test_rows_of_only_padding_are_finite(adapted):
    """Nothing to attend to gives no NaN, neither in values nor in gradients."""
    m, base, trainable = adapted
    zeros = jnp.zeros((2, 9), jnp.int32)

    @jax.jit
    def loss(adapters, segments):
        inputs = Inputs(zeros, zeros, segments)
        return jnp.sum(jnp.square(hidden(m, base, adapters, inputs)))

    for segments in (zeros, zeros.at[0, :3].set(1)):
        chex.assert_tree_all_finite(jax.value_and_grad(loss)(trainable, segments))


def test_cache_is_the_whole_sequence(adapted):
    """Prefill and token by token, in rows of different lengths."""
    m, base, trainable = adapted
    bound, tokens = m.bind(base, trainable), jnp.asarray(tiny.tokens(2, 9))
    want = np.asarray(hidden(m, base, trainable, tiny.inputs(tokens)))

    @jax.jit
    def run(chunk, positions, cache):
        return kv_cache.hidden(
            m.family, m.config, bound, chunk, positions, cache, dtype=jnp.float32
        )

    place = jnp.broadcast_to(jnp.arange(9), (2, 9))
    empty = kv_cache.empty(m.config, 2, 12, jnp.float32)
    got, cache = run(tokens[:, :6], place[:, :6], empty)
    np.testing.assert_allclose(got, want[:, :6], rtol=0, atol=1e-5)
    # Row 0 goes on at position 6; row 1 was only 4 long, so its next position is 4.
    starts = np.array([6, 4])
    for offset in range(3):
        at = (starts + offset)[:, None]
        got, cache = run(jnp.take_along_axis(tokens, at, axis=1), jnp.asarray(at), cache)
        np.testing.assert_allclose(
            got[:, 0], want[np.arange(2), starts + offset], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(
    "field",
    ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
     "rms_norm_eps"],
)  # fmt: skip
def test_missing_field_is_named(field):
    with pytest.raises(errors.ModelError, match=rf"config.json: {field}: is missing"):
        tiny.model(**{field: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size = '32': is not a size"),
        ({"vocab_size": 0}, "vocab_size = 0: is not a size"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings = .64.: is not a size"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True: is not a size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: does not divide .*= 4"),
        ({"head_dim": 7}, "head_dim = 7: is odd"),
        ({"sliding_window": 4096}, "sliding_window = 4096: is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes': is neither true nor"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps = -1e-05: is not a number > 0"),
        ({"rope_theta": "big"}, "rope_theta = 'big': is not a positive number"),
        ({"architectures": ["MambaForCausalLM"]}, "architectures = .*Mamba.*known: Llama"),
        ({"architectures": None}, "architectures: is not a list of one.*known: LlamaForCausalLM"),
    ],
)
def test_wrong_field_is_named(changes, message):
    with pytest.raises(errors.ModelError, match=message):
        tiny.model(**changes)


def test_all_wrong_fields_are_named_at_once():
    with pytest.raises(errors.ModelError) as caught:
        tiny.model(hidden_size=None, vocab_size=None, hidden_act="gelu", attention_bias=1)
    text = str(caught.value)
    for name in ("hidden_size", "vocab_size", "hidden_act", "attention_bias"):
        assert f"config.json: {name}" in text
    assert len(caught.value.problems) == 4


def test_hf_names_cover_every_layer():
    m = tiny.model(tie_word_embeddings=False, attention_bias=True)
    names = [n for path in m.flat_infos for n in m.hf_names[path]]
    assert len(names) == len(set(names)) == 3 + tiny.LAYERS * (9 + 4)
    assert {"model.layers.2.self_attn.q_proj.bias", "lm_head.weight", "model.norm.weight"} <= set(
        names
    )


@pytest.mark.parametrize(("name", "value"), [("num_hidden_layers", 10**9), ("vocab_size", 10**30)])
def test_absurd_sizes_are_refused_at_once(name, value):
    config = {**builtin.tiny().source.config, name: value}
    with pytest.raises(errors.ModelError, match=f"{name} = {value}: is not a size"):
        causal_lm.from_hf(config, "config.json", dtype="float32")
