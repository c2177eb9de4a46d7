"""SmolLM2-135M-Instruct against transformers' reference values (tests/oracles)."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purelora.interop import builtin
from purelora.models import causal_lm, decode
from purelora.ops import quant
from purelora.sharding import specs
from purelora.weights import load as weights_load
from tests.support.oracle_values import ORACLES, logits_of, nll_of

ORACLE = json.loads((ORACLES / "smollm2_135m.json").read_text())
pytestmark = pytest.mark.download


@functools.cache
def smollm2(qtype: str, tile_size: int | None):
    """The model and its base on one device."""
    opened = builtin.open_model("smollm2-135m")
    model = causal_lm.from_hf(opened.source.config, opened.source.path, dtype="float32")
    infos = quant.quantised_infos(
        model.infos, qtype=qtype, tile_size=tile_size, skip=("embed_tokens",)
    )
    mesh = specs.make_mesh(1, 1, jax.devices()[:1])
    placed = specs.shardings(specs.spec_tree(infos, mesh), mesh)
    return model, weights_load.load(opened.source, model, infos, placed).tree, opened.tokenizer


def logits(ids: list[int], qtype: str = "none", tile_size: int | None = None) -> np.ndarray:
    model, base, _ = smollm2(qtype, tile_size)
    return logits_of(model, base, ids)


def nll(ids: list[int], **options) -> np.ndarray:
    return nll_of(logits(ids, **options), ids)


def test_paragraph_nll():
    found = nll(ORACLE["para"]["ids"])
    assert found.mean() == pytest.approx(2.135982, abs=1e-3)
    np.testing.assert_allclose(found, ORACLE["para"]["nll_per_token"], atol=1e-3)


def test_sft_sample_nll_over_the_assistants_targets():
    sft = ORACLE["sft"]
    found = nll(sft["ids"])[sft["prompt_len"] - 1 :]
    assert len(found) == 14
    assert found.mean() == pytest.approx(0.794973, abs=2e-3)


def test_last_position_logits():
    stored = np.load(ORACLES / "smollm2_135m.npz")
    for name, ids in (("plain", ORACLE["plain"]["prompt_ids"]), ("para", ORACLE["para"]["ids"])):
        np.testing.assert_allclose(logits(ids)[-1], stored[f"{name}_last_logits"], atol=1e-2)


@pytest.mark.parametrize("name", ["plain", "chat"])
def test_twenty_greedy_ids_are_exact(name):
    model, base, _ = smollm2("none", None)
    found = decode.complete(
        model, {}, base, [ORACLE[name]["prompt_ids"]], end_ids=(), max_new_tokens=20,
        dtype=jnp.float32,
    )  # fmt: skip
    assert found == [ORACLE[name]["new_ids"]]


@pytest.mark.parametrize(
    ("qtype", "tile_size", "want"),
    [
        ("int8", None, 2.1479),
        ("int8", 32, 2.1422),
        ("nf4", 64, 2.3579),
        ("int4", 32, 2.3176),
        ("fp8", None, 2.1361),
    ],
)
def test_paragraph_nll_with_a_quantised_base(qtype, tile_size, want):
    found = nll(ORACLE["para"]["ids"], qtype=qtype, tile_size=tile_size)
    assert found.mean() == pytest.approx(want, abs=3e-3)
