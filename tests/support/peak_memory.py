"""The peak of the memory of a process that loads a base."""

import os
import subprocess
import sys

from tests.support import runs


def peak_growth(folder, qtype: str) -> int:
    """Bytes by which the peak of a process's memory grows when it loads a base."""
    command = [sys.executable, "-m", "tests.support.programs.peak_of_load", str(folder), qtype]
    # So that what is freed goes back to the system, and not into a heap whose size is chance.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, cwd=runs.REPO
    )
    return int(done.stdout)
