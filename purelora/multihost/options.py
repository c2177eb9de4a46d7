"""The arguments and environment variables that make a process one of several."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from purelora.core import errors

# With less, a process that is only busy counts as one that is gone.
LEAST_HEARTBEAT_SECS = 5
_ENVIRONMENT = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """Where this process stands among the processes of a run.

    Attributes:
      coordinator_address: HOST:PORT of process 0, which opens that port; the environment variable
        JAX_COORDINATOR_ADDRESS says the same.
      num_processes: how many there are (JAX_NUM_PROCESSES).
      process_id: which this is, from 0 (JAX_PROCESS_ID).
      distributed: let JAX find the rest in its environment: Slurm, Open MPI, Kubernetes, Cloud TPU.
      heartbeat_timeout_seconds: a process that is silent for so long ends the run.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    distributed: bool = False
    heartbeat_timeout_seconds: int = 30

    def completed(self, environment: Mapping[str, str]) -> "ProcessOptions":
        """The options, with the environment's values for the fields that are None.

        Raises:
          ConfigError: values that are no numbers, out of range, or do not go together.
        """
        stated: dict[str, Any] = {}
        for field, variable in _ENVIRONMENT.items():
            text = environment.get(variable)
            if getattr(self, field) is None and text:
                is_number = field != "coordinator_address"
                if is_number and not text.isdecimal():
                    raise errors.ConfigError(variable, text, "is not a whole number", "")
                stated[field] = int(text) if is_number else text
        options = dataclasses.replace(self, **stated)
        problems = list(options._problems())
        if problems:
            raise errors.ConfigError.of(problems)
        return options

    @property
    def is_one_of_several(self) -> bool:
        """Whether there are other processes."""
        return self.distributed or self != ProcessOptions(
            heartbeat_timeout_seconds=self.heartbeat_timeout_seconds
        )

    def _problems(self) -> Iterator[errors.Problem]:
        address, count, index = self.coordinator_address, self.num_processes, self.process_id
        if address is not None and not _is_address(address):
            what, remedy = "is no host with a port", "write HOST:PORT, the same for all processes"
            yield errors.Problem("--coordinator_address", address, what, remedy)
        if count is not None and count < 1:
            yield errors.Problem("--num_processes", count, "must be at least 1", "")
        if index is not None and not 0 <= index < (count or index + 1):
            what = "must be from 0 to the number of processes less one"
            yield errors.Problem("--process_id", index, what, "")
        if self.heartbeat_timeout_seconds < LEAST_HEARTBEAT_SECS:
            what = f"must be at least {LEAST_HEARTBEAT_SECS}"
            yield errors.Problem(
                "--heartbeat_timeout_seconds", self.heartbeat_timeout_seconds, what, ""
            )
        values = (address, count, index)
        if not self.distributed and None in values and values != (None,) * 3:
            missing = [n for n, v in zip(_ENVIRONMENT, values, strict=True) if v is None]
            what = f"must be given too (or {', '.join(_ENVIRONMENT[name] for name in missing)})"
            where = ", ".join(f"--{name}" for name in missing)
            yield errors.Problem(where, None, what, "or --distributed, if JAX knows the cluster")


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16
