"""Generation against a plain loop of whole forward passes; sampling; text of single tokens."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from purelora.core import errors, param_info, trees
from purelora.core.batch import Inputs
from purelora.inference import generation
from purelora.interop import builtin
from purelora.models import causal_lm, decode, kv_cache, sampling
from purelora.sharding import specs
from purelora.weights import random_weights
from purelora.weights import tokenizer as tokenizer_lib
from tests.support import tiny


@pytest.fixture(scope="module")
def model_and_trees():
    model = causal_lm.from_hf(builtin.tiny().source.config, "tiny", dtype="float32")
    model = tiny.with_lora(model, r=2)
    base = param_info.initial_tree(model.infos, key=jax.random.key(0))
    adapters = param_info.initial_tree(model.adapter_infos(), key=jax.random.key(1))
    return model, base, jax.tree.map(lambda leaf: leaf + 0.05, adapters)


def plain_greedy(model, base, adapters, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    logits = jax.jit(lambda inputs: model.logits(adapters, base, inputs))
    length = len(prompt) + count  # One shape: what follows the last token is not looked at.
    for _ in range(count):
        tokens = jnp.asarray(ids + [0] * (length - len(ids)), jnp.int32)[None]
        inputs = Inputs(tokens, jnp.arange(length)[None], jnp.ones_like(tokens))
        ids.append(int(np.asarray(logits(inputs))[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


PROMPTS = [[5], [7, 8, 9, 10, 200, 3], list(range(40))]


def test_rows_of_different_lengths_equal_the_plain_loop(model_and_trees):
    model, base, adapters = model_and_trees
    found = decode.complete(
        model, adapters, base, PROMPTS, end_ids=(), max_new_tokens=9, dtype=jnp.float32
    )
    assert found == [plain_greedy(model, base, adapters, prompt, 9) for prompt in PROMPTS]


def test_every_end_token_stops_its_own_row_and_is_kept(model_and_trees):
    model, base, adapters = model_and_trees
    free = [plain_greedy(model, base, adapters, prompt, 9) for prompt in PROMPTS]
    ends = (free[0][2], free[1][4])
    found = decode.complete(
        model, adapters, base, PROMPTS, end_ids=ends, max_new_tokens=9, dtype=jnp.float32
    )
    want = []
    for row in free:
        stops = [i for i, token in enumerate(row) if token in ends]
        want.append(row[: stops[0] + 1] if stops else row)
    assert found == want
    assert len(found[0]) <= 3


def test_rows_give_no_token_after_their_end(model_and_trees):
    model, base, adapters = model_and_trees
    options = {"max_new_tokens": 9, "dtype": jnp.float32}
    free = decode.complete(model, adapters, base, PROMPTS, end_ids=(), **options)
    end = free[0][2]
    steps = list(decode.stream(model, adapters, base, PROMPTS, end_ids=(end,), **options))
    ended = [None in column for column in zip(*steps, strict=True)]
    assert ended[0] or len(steps) == free[0].index(end) + 1
    for row, column in zip(free, zip(*steps, strict=True), strict=True):
        stop = row.index(end) + 1 if end in row else len(row)
        assert list(column) == row[:stop] + [None] * (len(steps) - stop)


def test_generation_ends_with_the_last_row(model_and_trees):
    model, base, adapters = model_and_trees
    every = range(model.config.vocab_size)
    options = {"max_new_tokens": 9, "dtype": jnp.float32}
    steps = list(decode.stream(model, adapters, base, PROMPTS, end_ids=every, **options))
    assert len(steps) == 1 and None not in steps[0]


DRAWS = sampling.Sampling(temperature=1.5, top_k=None, top_p=0.9)


def test_draws_of_a_row_depend_on_the_seed_and_its_number_alone(model_and_trees):
    model, base, adapters = model_and_trees

    def draw(prompts, seed=3, first_row=0):
        return decode.complete(
            model, adapters, base, prompts, end_ids=(), max_new_tokens=8, dtype=jnp.float32,
            how=DRAWS, seed=seed, first_row=first_row,
        )  # fmt: skip

    together = draw(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        assert draw([prompt], first_row=row) == [together[row]]
    assert draw(PROMPTS[1:], first_row=1) == together[1:]
    assert draw(PROMPTS) == together
    other = draw(PROMPTS, seed=4)
    assert all(a != b for a, b in zip(other, together, strict=True))
    same = draw([PROMPTS[1]] * 3)
    assert len(set(map(tuple, same))) == 3
    assert all(len(set(row)) > 1 for row in same)


@contextlib.contextmanager
def compilations():
    """Counts what is compiled meanwhile."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **_) -> None:
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_few_shapes_are_compiled(model_and_trees):
    model, base, adapters = model_and_trees
    options = {"end_ids": (), "dtype": jnp.float32}
    with compilations() as found:
        decode.complete(model, adapters, base, [[1] * 33], max_new_tokens=60, **options)
    assert found
    with compilations() as found:
        for length, count in ((40, 50), (64, 64), (35, 1)):
            decode.complete(model, adapters, base, [[1] * length], max_new_tokens=count, **options)
    assert not found


def test_the_cache_is_written_in_place():
    """Neither it nor a stack of weights is copied: temporaries are small beside them."""
    m = tiny.model(num_hidden_layers=16)
    base, slots = tiny.weights(m), 2048
    static = decode._Static(m, sampling.GREEDY, np.dtype("float32"))
    cache = kv_cache.empty(m.config, 2, slots, jnp.float32)
    state = decode._Rows(
        jnp.ones(2, jnp.int32),
        jnp.ones(2, jnp.int32),
        jnp.int32(1),
        jax.random.split(jax.random.key(0), 2),
    )
    compiled = decode._advance.lower({}, base, state, cache, static=static).compile()
    memory = compiled.memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 4


@pytest.mark.parametrize("fsdp", [2, 8])
def test_a_sharded_base_gives_the_same_tokens(model_and_trees, fsdp):
    """And the cache comes out of a step as it went in, or each step would be compiled anew."""
    model, base, adapters = model_and_trees
    mesh = tiny.mesh(1, fsdp)
    placed = specs.shardings(specs.spec_tree(model.infos, mesh), mesh)
    options = {"end_ids": (), "max_new_tokens": 6, "dtype": jnp.float32}
    want = decode.complete(model, adapters, base, PROMPTS, **options)
    spread = jax.device_put(base, placed)
    copied = jax.device_put(adapters, specs.replicated(mesh))
    with compilations() as found:
        assert decode.complete(model, copied, spread, PROMPTS, **options) == want
    assert len(found) == 2


def test_bfloat16_and_quantised_bases_generate(model_and_trees):
    model, base, adapters = model_and_trees
    for qtype in ("int8", "int4", "nf4", "fp8"):
        codes, _ = tiny.quantised(model, base, qtype, 16, ("embed_tokens",))
        found = decode.complete(
            model, adapters, codes, PROMPTS, end_ids=(), max_new_tokens=3, dtype=jnp.bfloat16
        )
        assert [len(row) for row in found] == [3] * 3


# ---- sampling ----------------------------------------------------------------------------------

HOWS = [
    sampling.Sampling(1.0, None, 1.0),
    sampling.Sampling(0.3, None, 1.0),
    sampling.Sampling(2.0, 5, 1.0),
    sampling.Sampling(1.0, 1, 1.0),
    sampling.Sampling(1.0, 1000, 1.0),
    sampling.Sampling(1.0, None, 0.9),
    sampling.Sampling(0.7, None, 0.3),
    sampling.Sampling(1.0, None, 1e-6),
    sampling.Sampling(1.0, None, 0.999),
    sampling.Sampling(1.3, 20, 0.8),
]


def some_logits(rows: int = 4, size: int = 100) -> np.ndarray:
    scale = np.array([[0.1], [1.0], [4.0], [20.0]])[:rows]
    return (scale * np.random.default_rng(0).standard_normal((rows, size))).astype(np.float32)


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_what_the_filters_keep(how):
    """Against a loop over the tokens from the most probable one down."""
    logits = some_logits()
    found = np.asarray(sampling.filtered(jnp.asarray(logits), how))
    for row, got in zip(logits.astype(np.float64) / how.temperature, found, strict=True):
        order = np.argsort(-row)[: how.top_k]
        probs = np.exp(row[order] - row.max()) / np.exp(row[order] - row.max()).sum()
        kept = order[: np.searchsorted(np.cumsum(probs), how.top_p) + 1]
        assert set(np.flatnonzero(np.isfinite(got))) == set(kept)
        np.testing.assert_allclose(got[kept], row[kept], rtol=1e-6)


def test_equal_logits_stay_together():
    """Of equal ones none is preferred, as in transformers for top-k."""
    logits = jnp.asarray([[2.0, 1.0, 1.0, 0.0]])
    for how in (sampling.Sampling(1.0, 2, 1.0), sampling.Sampling(1.0, None, 0.7)):
        assert np.isfinite(sampling.filtered(logits, how)).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("how", [HOWS[0], HOWS[2], HOWS[5]], ids=str)
def test_draws_have_the_probabilities_that_the_filters_leave(how):
    logits = some_logits(1, 6)
    rows = 20_000
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(rows))
    many = jnp.broadcast_to(jnp.asarray(logits), (rows, 6))
    for made in (0, 5):
        drawn = np.asarray(sampling.pick(many, keys, jnp.int32(made), how))
        share = np.bincount(drawn, minlength=6) / rows
        want = np.asarray(jax.nn.softmax(sampling.filtered(jnp.asarray(logits), how)))[0]
        np.testing.assert_allclose(share, want, atol=4 * 0.5 / np.sqrt(rows))
        assert not share[want == 0].any()


def test_each_token_of_a_row_is_drawn_anew():
    logits, keys = jnp.zeros((1, 1000)), jax.random.split(jax.random.key(0), 1)
    drawn = [int(sampling.pick(logits, keys, jnp.int32(i), HOWS[0])[0]) for i in range(8)]
    assert len(set(drawn)) > 5


@pytest.mark.reference
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_filters_equal_those_of_transformers(how):
    import torch
    from transformers.generation import logits_process

    logits = np.concatenate([some_logits(), some_logits(size=5000)[:, :100]])
    chain = [logits_process.TemperatureLogitsWarper(how.temperature)]
    if how.top_k is not None:
        chain.append(logits_process.TopKLogitsWarper(how.top_k))
    if how.top_p < 1:
        chain.append(logits_process.TopPLogitsWarper(how.top_p))
    theirs = torch.from_numpy(logits)
    for process in chain:
        theirs = process(None, theirs)
    ours = np.asarray(sampling.filtered(jnp.asarray(logits), how))
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs.numpy()))
    want = torch.softmax(theirs, -1).numpy()
    np.testing.assert_allclose(jax.nn.softmax(jnp.asarray(ours)), want, rtol=2e-5, atol=1e-9)


@pytest.mark.reference
def test_greedy_equals_transformers_for_uneven_prompts():
    import torch
    import transformers

    opened = builtin.tiny()
    model = causal_lm.from_hf(opened.source.config, "tiny", dtype="float32")
    arrays = {
        name: 8 * array if array.ndim == 2 else array  # Spread, so that no two logits tie.
        for name, array in random_weights.drawn(opened.source.config, seed=1).items()
    }
    flat = {}
    for path, names in model.hf_names.items():
        transposed = model.flat_infos[path].contracting == -2
        stack = [arrays[name].T if transposed else arrays[name] for name in names]
        flat[path] = np.stack(stack) if path.startswith("layers.") else stack[0]
    base = jax.device_put(trees.unflatten(flat))
    known = {k: v for k, v in opened.source.config.items() if k != "architectures"}
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**known)).eval()
    reference.load_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()}, strict=False)
    reference.tie_weights()
    reference.generation_config.eos_token_id = None
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    out = reference.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    found = decode.complete(
        model, {}, base, PROMPTS, end_ids=(), max_new_tokens=12, dtype=jnp.float32
    )
    assert found == out[:, width:].tolist()
    assert len({tuple(row) for row in found}) == 3


# ---- text --------------------------------------------------------------------------------------


def pieces(tokenizer, ids) -> list[str]:
    text = generation.TextStream(tokenizer, tokenizer.eos_ids)
    return [*(text.push(i) for i in ids), text.finish()]


def byte_fallback() -> tokenizer_lib.Tokenizer:
    """As sentencepiece has it: words, and single bytes for what is in none; a space in front."""
    words = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "a", "\u2581a", "b"]
    model = tokenizers.models.BPE(
        {w: i for i, w in enumerate(words)},
        [("\u2581", "a")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    kinds = tokenizers.decoders
    backend.decoder = kinds.Sequence(
        [kinds.Replace("\u2581", " "), kinds.ByteFallback(), kinds.Fuse(), kinds.Strip(" ", 1, 0)]
    )
    return tokenizer_lib.build(
        "made", backend, special_tokens={"eos_token": "</s>"}, end_ids=(), add_bos=False,
        chat_template=None,
    )  # fmt: skip


def test_characters_come_whole():
    tokenizer = builtin.tiny().tokenizer
    text = "né 日本 👩‍👩‍👧 \n end"
    found = pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids)
    assert "".join(found) == text
    assert [p for p in found if p] == list(text)
    assert found[2] == "é" and found[1] == ""


@given(text=st.text(max_size=30))
def test_pieces_of_any_text_join_to_it(text):
    tokenizer = builtin.tiny().tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, 258), max_size=30))
def test_pieces_of_any_bytes_join_to_their_text(ids):
    tokenizer = builtin.tiny().tokenizer
    kept = [i for i in ids if i not in tokenizer.eos_ids]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(kept, skip_special_tokens=True)


def test_bytes_and_spaces_of_a_sentencepiece_vocabulary():
    tokenizer = byte_fallback()
    euro = [2 + b for b in "€".encode()]
    space_a, b = 260, 261
    found = pieces(tokenizer, [space_a, space_a, *euro, b, *euro[:2]])
    assert found == ["a", " a", "", "", "€", "b", "", "", "\N{REPLACEMENT CHARACTER}" * 2]


def test_end_tokens_have_no_text():
    tokenizer = builtin.tiny().tokenizer
    assert pieces(tokenizer, [65, *tokenizer.eos_ids])[1:] == [""] * len(tokenizer.eos_ids) + [""]


def test_logits_that_are_not_finite_are_an_error(model_and_trees):
    model, base, adapters = model_and_trees
    huge = jax.tree.map(lambda leaf: jnp.full_like(leaf, 3e38), adapters)
    with pytest.raises(errors.ModelError, match="logits: are not finite"):
        decode.complete(
            model, huge, base, [[1, 2, 3]], end_ids=[0], max_new_tokens=3, dtype=jnp.float32
        )
