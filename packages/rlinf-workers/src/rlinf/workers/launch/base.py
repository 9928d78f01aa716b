"""What a launcher is: start, watch, kill. The same for threads and for Ray."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rlinf.comm import Registry, RegistryServer
from rlinf.workers.devices import Node

__all__ = ["Ended", "Launcher", "Link", "Process", "Program"]

Ended = Callable[[str], None]
"""Called once, on any thread, when a process is gone: how it ended, in words. Must not block."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a program is given where it runs.

    Attributes:
        registry: Where it finds everybody else.
        cores: The CPU cores it may pin its process to; empty where others share its process.
    """

    registry: Registry
    cores: tuple[int, ...] = ()


class Program(Protocol):
    """What runs in a process. Sent there by cloudpickle."""

    @property
    def id(self) -> str:
        """Name for logs and process lists: "rollout/0"."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices it computes on; they decide the node."""

    @property
    def cores(self) -> tuple[int, ...]:
        """Those of its devices that are CPU cores: their indexes among the ones it may use.

        It computes with as many threads, one at least."""

    def run(self, link: Link) -> None:
        """Work until told to end; called on the main thread of the process."""


class Process(ABC):
    """One started program."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, whatever state it is in (also stopped). Does nothing if it has ended."""

    @abstractmethod
    def join(self, timeout_s: float) -> bool:
        """Wait until it has ended; False if it had not in time."""


class Launcher(ABC):
    """Starts programs. `start` may be called from several threads; it returns before they run.

    Attributes:
        registry: The job's registry: for endpoints in this process, and for tools outside.
    """

    registry: RegistryServer

    @abstractmethod
    def nodes(self) -> tuple[Node, ...]:
        """The machines there are; may wait for a cluster to be joined."""

    @abstractmethod
    def start(self, program: Program, ended: Ended) -> Process:
        """Start the program.

        Raises:
            StartError: It cannot be started at all.
        """

    @abstractmethod
    def close(self) -> None:
        """End every process that is left and give everything back."""
