"""Gemma 4: fields of its config.json, and the runs of its layers."""

import jax
import jax.numpy as jnp
import pytest

from purelora.core import errors
from tests.support import tiny

EXPERTS, SHARED = "gemma4 with experts", "gemma4 with shared keys"
FULL_HEADS = {"head_dim": 16, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ("gemma4", {"global_head_dim": 15}, "see everything: head_dim = 15: is odd"),
        ("gemma4", {"num_global_key_value_heads": 4},
         "see everything: num_key_value_heads = 4: does not divide num_attention_heads = 6"),
        ("gemma4", {"hidden_size_per_layer_input": None}, "size_per_layer_input: is missing"),
        ("gemma4", {"per_layer_config": {"1": FULL_HEADS}}, "per_layer_config = .*: is not the"),
        ("gemma4", {"per_layer_config": {n: FULL_HEADS | {"sliding_window": 3} for n in "257"}},
         r"per_layer_config = .*sliding_window.*: is not supported"),
        ("gemma4", {"per_layer_config": {n: FULL_HEADS | {"head_dim": 16 + 2 * int(n)}
                                         for n in "257"}}, "per_layer_config = .*: is not the"),
        ("gemma4", {"rope_parameters": {"full_attention": {
            "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 1.5}}},
         "partial_rotary_factor = 1.5: is more than 1"),
        (EXPERTS, {"top_k_experts": 6}, "top_k_experts = 6: is more than num_experts = 5"),
        (EXPERTS, {"num_experts": None}, "num_experts: is missing"),
        (SHARED, {"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6: leaves no full_"),
        (SHARED, {"vocab_size_per_layer_input": 63}, "size_per_layer_input = 63: is less"),
        (SHARED, {"vocab_size_per_layer_input": None}, "size_per_layer_input: is missing"),
    ],
)  # fmt: skip
def test_wrong_field_is_named(name, changes, message):
    with pytest.raises(errors.ModelError, match=f"config.json.*{message}"):
        tiny.model(name, **changes)


def test_newer_files_state_heads_by_layer():
    old = tiny.model("gemma4").config
    listed = {n: FULL_HEADS for n in "257"}
    changes = {"global_head_dim": None, "num_global_key_value_heads": None}
    assert tiny.model("gemma4", per_layer_config=listed, **changes).config == old


def test_the_last_layer_sees_everything():
    """The last layer has full attention whatever the file says, as in transformers."""
    types = ["sliding_attention"] * 8
    config = tiny.model("gemma4", layer_types=types).config
    assert [kind.window for kind in config.layer_kinds] == [4] * 7 + [None]
    assert config.groups[0].layers == tuple(range(7))
    absent = tiny.model("gemma4", layer_types=None, num_hidden_layers=14).config
    assert [i for i, kind in enumerate(absent.layer_kinds) if kind.window is None] == [5, 11, 13]


def gradient_eqns(**changes):
    """The jaxpr of the gradient of a scanned Gemma 4 whose last layers share keys."""
    m = tiny.with_lora(tiny.model(SHARED, **changes))
    shapes = jax.eval_shape(lambda: (tiny.adapters(m), tiny.weights(m)))
    inputs = tiny.inputs(tiny.tokens(1, 7))

    def loss(adapters, base):
        how = {"dtype": jnp.float32, "scan_layers": True, "remat": False}
        return m.hidden(m.bind(base, adapters), inputs, **how)[0].sum()

    return jax.make_jaxpr(jax.grad(loss))(*shapes)


def test_what_is_compiled_does_not_grow_with_periods():
    """More periods, of layers that have keys or of layers that share them, compile to as much."""

    def size(periods):
        types = ["sliding_attention", "sliding_attention", "full_attention"] * 2 * periods
        changes = {"num_hidden_layers": len(types), "num_kv_shared_layers": 3 * periods}
        return str(gradient_eqns(layer_types=types, **changes)).count(" = ")

    assert size(3) == size(5)


def test_shared_keys_are_saved_once():
    """They are saved once for all layers that use them, as a constant of their scan."""
    types = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
    eqns = gradient_eqns(num_hidden_layers=6, **types).jaxpr.eqns
    scans = [eqn for eqn in eqns if eqn.primitive.name == "scan"]

    def saved(eqn, heads):
        """Arrays of so many heads of 7 tokens and 12 elements, for each layer."""
        shapes = [var.aval.shape for var in eqn.outvars if var.aval.ndim == 5]
        return [shape for shape in shapes if sorted(shape[2:]) == sorted((heads, 7, 12))]

    assert [eqn.params["length"] for eqn in scans[:4]] == [2, 1, 2, 1]
    assert len(saved(scans[0], 3)) >= 2
    assert saved(scans[2], 6) and not saved(scans[2], 3)
