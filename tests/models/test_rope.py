"""Rotary frequencies: every spelling of every scaling, and an error in place of a guess."""

import jax.numpy as jnp
import numpy as np
import pytest

from purelora.core import errors
from purelora.models import layers, rope
from tests.support import tiny

HEAD = 16
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
POSITIONS = (0, 100, 9000)


def formula(theta: float, kind: str = "default", fields: dict | None = None) -> np.ndarray:
    """One frequency at a time, as the papers and Llama 3.1's reference code have it."""
    found = []
    for i in range(HEAD // 2):
        f = theta ** (-2 * i / HEAD)
        if kind == "linear":
            f /= fields["factor"]
        if kind == "llama3":
            wavelength, context = 2 * np.pi / f, fields["original_max_position_embeddings"]
            low, high = fields["low_freq_factor"], fields["high_freq_factor"]
            if wavelength > context / low:
                f /= fields["factor"]
            elif wavelength > context / high:
                smooth = (context / wavelength - low) / (high - low)
                f = (1 - smooth) * f / fields["factor"] + smooth * f
        found.append(f)
    return np.array(found)


CASES = {
    "old": ({"rope_theta": 1e4}, formula(1e4)),
    "theta left out of an old file": ({}, formula(1e4)),
    "null scaling": ({"rope_theta": 5e5, "rope_scaling": None}, formula(5e5)),
    "theta only inside": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
                          formula(5e5)),
    "theta beside rope_parameters": (
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, formula(5e5)),
    "linear": ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 4}},
               formula(1e4, "linear", {"factor": 4})),
    "linear, old key": ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
                        formula(1e4, "linear", {"factor": 4})),
    "llama3": ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
               formula(5e5, "llama3", LLAMA3)),
    "llama3, type": ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
                     formula(5e5, "llama3", LLAMA3)),
    "llama3, new": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
                    formula(5e5, "llama3", LLAMA3)),
    "both, equal": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3},
         "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        formula(5e5, "llama3", LLAMA3)),
    "theta inside rope_scaling": (
        {"rope_scaling": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        formula(5e5, "llama3", LLAMA3)),
}  # fmt: skip


def yarn(
    theta: float, fields: dict, *, fast: float = 32, slow: float = 1, truncate: bool = True
) -> np.ndarray:
    """The same for yarn: the ramp runs between the pairs that turn `fast` and `slow` times."""
    context, factor = fields["original_max_position_embeddings"], fields["factor"]

    def pair(turns: float) -> float:
        # theta^(-2i/H) · context = turns · 2π, solved for i.
        return HEAD / 2 * np.log(context / (2 * np.pi * turns)) / np.log(theta)

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    found = []
    for i, f in enumerate(formula(theta)):
        slowed = min(max((i - max(low, 0)) / (min(high, HEAD - 1) - max(low, 0)), 0), 1)
        found.append(f * (1 - slowed) + f / factor * slowed)
    return np.array(found)


CASES |= {
    "yarn": ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
             (yarn(1e6, YARN), 0.1 * np.log(4) + 1)),
    "yarn, fractions": (
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False,
                                             "beta_fast": 16, "beta_slow": 2}},
        (yarn(1e4, YARN, fast=16, slow=2, truncate=False), 0.1 * np.log(4) + 1)),
    "yarn, factor given": (
        {"rope_theta": 1e6,
         "rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.5}},
        (yarn(1e6, YARN), 1.5)),
    "yarn, mscales": (
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 1.0,
                                             "mscale_all_dim": 0.5}},
        (yarn(1e6, YARN), (0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1))),
}  # fmt: skip


def without(field: str) -> dict:
    return {k: v for k, v in LLAMA3.items() if k != field}


@pytest.mark.parametrize("name", CASES)
def test_frequencies(name):
    config, want = CASES[name]
    got = rope.read(config, HEAD, "config.json", absent_theta=1e4)
    factor = 1.0
    if isinstance(want, tuple):
        want, factor = want
    assert len(got.inv_freq) == HEAD // 2
    np.testing.assert_allclose(got.inv_freq, want, rtol=1e-6)
    np.testing.assert_allclose(got.attention_factor, factor, rtol=1e-6)


def test_llama3_uses_all_three_bands():
    """The control of the cases above: some kept, some divided, some between."""
    ratio = formula(5e5) / formula(5e5, "llama3", LLAMA3)
    assert (ratio == 1).any() and np.isclose(ratio, 8).any()
    assert ((ratio > 1.01) & (ratio < 7.9)).any()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **without(field)}},
             rf"config.json: rope scaling 'llama3': {field}: is missing")
            for field in LLAMA3
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **without("factor")}},
         r"rope scaling 'llama3': factor: is missing"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear"}},
         r"rope scaling 'linear': factor: is missing"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": "4"}},
         r"factor = '4': is not a positive number"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 0}},
         r"factor = 0: is not a positive number"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
         r"rope_type = 'longrope': is not supported; supported: default, linear, llama3, yarn"),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
         r"rope scaling 'yarn': original_max_position_embeddings: is missing"),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN, "beta_fast": "32"}},
         r"rope scaling 'yarn': beta_fast = '32': is not a positive number"),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN, "truncate": 1}},
         r"rope scaling 'yarn': truncate = 1: is neither true nor false"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                              "partial_rotary_factor": 0.5}},
         r"partial_rotary_factor = 0.5: is not supported"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
         r"rope_type = 'dynamic': is not supported"),
        ({"rope_parameters": {"rope_type": "default"}}, r"config.json: rope_theta: is missing"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                              "full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
         r"rope_theta: is missing"),
        ({}, r"config.json: rope_theta: is missing"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", **YARN}},
         r"rope_theta = 1.0: is not above 1"),
        ({"rope_theta": True}, r"rope_theta = True: is not a positive number"),
        ({"rope_theta": -1.0}, r"rope_theta = -1.0: is not a positive number"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3},
          "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
         r"rope_scaling = .* and rope_parameters differ in rope_type, factor, .*; delete"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0},
          "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
         r"rope_scaling = .* and rope_parameters differ in factor; delete"),
        ({"rope_theta": 1e4, "rope_scaling": 4.0}, r"rope_scaling = 4.0: is not an object"),
    ],
)  # fmt: skip
def test_errors_name_the_field(config, message):
    with pytest.raises(errors.ModelError, match=message):
        rope.read(config, HEAD, "config.json")


@pytest.mark.parametrize("name", ["llama3", "linear", "theta only inside", "yarn"])
@pytest.mark.parametrize("position", POSITIONS)
def test_rotation_at_a_position(name, position):
    """The pair (i, i + H/2) turns by position · frequency, also far out."""
    config, _ = CASES[name]
    rotation = rope.read(config, HEAD, "config.json")
    frequencies = np.array(rotation.inv_freq)
    x = np.random.default_rng(0).standard_normal((1, 1, 2, HEAD)).astype(np.float32)
    angles = layers.rope_angles(jnp.full((1, 1), position), rotation)
    got = layers.rope(jnp.asarray(x), angles)
    half = HEAD // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * position * frequencies.astype("f8"))
    want = np.concatenate([turned.real, turned.imag], axis=-1) * rotation.attention_factor
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-3 if position == 9000 else 3e-5)
    if position == 0 and name != "yarn":
        np.testing.assert_array_equal(got, x)


def test_bfloat16_keeps_positions_apart():
    """bfloat16 cannot hold 257: positions are cast only after the sine."""
    rotation = rope.read({"rope_theta": 1e4}, HEAD, "config.json")
    x = jnp.ones((1, 2, 1, HEAD), jnp.bfloat16)
    out = layers.rope(x, layers.rope_angles(jnp.array([[256, 257]]), rotation))
    assert out.dtype == jnp.bfloat16
    assert np.abs(out[0, 0, 0, 0] - out[0, 1, 0, 0]) > 0.1


def test_the_model_uses_its_configs_frequencies():
    scaling = {"rope_type": "llama3", **LLAMA3}
    config = tiny.model(rope_theta=5e5, rope_scaling=scaling, head_dim=HEAD).config
    np.testing.assert_allclose(
        config.kinds[0].rope.inv_freq, formula(5e5, "llama3", LLAMA3), rtol=1e-6
    )


@pytest.mark.reference
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers(name):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama

    config = {"head_dim": HEAD, "max_position_embeddings": 65536} | CASES[name][0]
    theirs = modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**config))
    ours = rope.read(config, HEAD, "config.json", absent_theta=1e4)
    np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq.numpy(), rtol=1e-6)
    np.testing.assert_allclose(ours.attention_factor, theirs.attention_scaling, rtol=1e-6)
