"""Test-wide settings: 8 virtual CPU devices, strict dtype and rank promotion."""

import gc
import os
import sys

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# Of the millions of objects that compiled functions keep, none are freed: look at them less often.
gc.set_threshold(200_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Models of the references are drawn alike in every run: some have kinks (clamps, routing)."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
