"""Test-wide settings: 8 virtual CPU devices, strict dtype and rank promotion, quick compilation."""

import gc
import os
import sys
from collections.abc import Iterator

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Halves the time to compile; results differ by rounding only. Processes that tests start do so too.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")

import jax
import pytest

from purelora.training import compilation
from tests.support import lanes

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# Of the millions of objects that compiled functions keep, none are freed: look at them less often.
gc.set_threshold(200_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _compiled_programs(pytestconfig: pytest.Config) -> None:
    """Compiles each program once for all processes, lanes and later runs in this checkout.

    A program's key is all of its text, its options and the version of XLA, and what is skipped is
    XLA's work alone. JAX stays with the folder of its first program, whatever a command says.
    """
    if pytestconfig.cache is not None:
        compilation.use_cache(str(pytestconfig.cache.mkdir("compiled")))
        jax.block_until_ready(jax.jit(jax.numpy.negative)(1.0))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lanes.mark(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Models of the references are drawn alike in every run: some have kinks (clamps, routing)."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture(scope="module")
def fully_compiled() -> Iterator[None]:
    """With all of XLA's optimisations, as users run it: for bounds of a few roundings."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
