"""The persistent compilation cache, and compiling a function ahead of time while counting hits."""

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from purelora.interop import builtin

_EVENTS = {
    "/jax/compilation_cache/cache_hits": "hits",
    "/jax/compilation_cache/cache_misses": "misses",
}


class Compiled(NamedTuple):
    """A compiled function.

    Attributes:
      call: takes exactly the shapes it was compiled for; any other is an error, never a recompile.
      secs: time to trace and compile it, or to fetch it from the cache.
      from_cache: whether the persistent cache had it.
    """

    call: Callable[..., Any]
    secs: float
    from_cache: bool

    def __str__(self) -> str:
        return f"{self.secs:.1f} s ({'cache hit' if self.from_cache else 'compiled'})"


def use_cache(folder: str | None) -> str | None:
    """Turns the persistent compilation cache on; returns its folder, None if it stays off."""
    if folder is None:
        return None
    path = os.path.join(builtin.default_cache(), "compiled") if folder == "default" else folder
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def compile_now(function: Any, *arguments: Any) -> Compiled:
    """Compiles a jitted function for these arguments."""
    counts = {"hits": 0, "misses": 0}

    def listen(event: str, **_: Any) -> None:
        if event in _EVENTS:
            counts[_EVENTS[event]] += 1

    start = time.perf_counter()
    jax.monitoring.register_event_listener(listen)
    try:
        compiled = function.lower(*arguments).compile()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    hit = counts["hits"] > 0 and counts["misses"] == 0
    return Compiled(compiled, time.perf_counter() - start, hit)
