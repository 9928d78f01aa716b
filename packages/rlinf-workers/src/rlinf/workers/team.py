"""Team: the ranks of one group that compute one thing together, over torch.distributed.

Rank 0 listens on a port of its own choice and serves it as "team"; the others ask for it, so there
is nothing to configure. A team lives as long as its workers: where a rank dies the whole group is
started again (it holds state), and its next incarnation makes a new team.

Every call here is collective: all ranks make the same calls in the same order. One that is not made
by everybody within `PATIENCE_S` fails on those that wait.
"""

import contextlib
import datetime
import importlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rlinf.comm import CommError, PeerLost, Request
from rlinf.workers.base import WorkerBase
from rlinf.workers.errors import ConfigError, WorkerError
from rlinf.workers.shards import Shard, assembled

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Team"]

SERVICE = "team"
MEET_S = 60.0
"""How long a rank waits for rank 0 to be there; the start of a process is in it."""
ASK_S = 0.2
LIBRARIES = ("gloo", "NCCL")
"""Which of them a message is from."""
PATIENCE_S = 600.0
"""How long a collective call waits for the last rank."""

T = TypeVar("T")
_lock = threading.Lock()
_alone = 0
"""Teams of one rank in this process; they share torch's default group."""


class Team:
    """See the module. A team of one needs no torch.distributed until `connect`.

    Args:
        rank: From 0.
        size: Number of ranks.
        meeting: (host, port) of rank 0's store, and on rank 0 the socket that listens there; for
            more than one rank.

    Raises:
        ConfigError: Ranks that share a process: torch has one default group in it.
        WorkerError: Not everybody came.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        meeting: tuple[str, int, socket.socket | None] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._joined = meeting is not None
        if meeting is not None:
            _join(rank, size, meeting)

    @classmethod
    def of(cls, worker: WorkerBase) -> "Team":
        """The team of a worker's group; called in its constructor, on every rank."""
        if worker.world_size == 1:
            return cls()
        if worker.rank == 0:
            return cls._lead(worker)
        host, port = _asked(worker)
        return cls(worker.rank, worker.world_size, (host, port, None))

    @classmethod
    def _lead(cls, worker: WorkerBase) -> "Team":
        host = worker.endpoint.config.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        place = (worker.context.incarnation, os.getpid(), host, port)

        def answer(request: Request) -> None:
            request.reply(place)

        worker.endpoint.serve(SERVICE, answer)
        return cls(0, worker.world_size, (host, port, listener))

    def connect(self) -> None:
        """See to it that torch's default process group is that of this team."""
        with _lock:
            if not self._joined:
                _join_alone()
                self._joined = True

    def gather(self, value: T) -> list[T]:
        """Everybody's value, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[T | None] = [None] * self.size
        with self.watched():
            dist.all_gather_object(gathered, value)
        return gathered  # type: ignore[return-value]

    def first(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return self.gather(value)[0]

    def add(self, tensor: "Tensor") -> None:
        """Put the sum of everybody's tensors, which are alike, in the place of each."""
        if self.size > 1:
            import torch.distributed as dist

            with self.watched():
                dist.all_reduce(tensor)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Name the loss of a mate, which gloo and nccl only call a RuntimeError: `PeerLost`."""
        try:
            yield
        except RuntimeError as error:
            first = str(error).splitlines()[0] if str(error) else ""
            if self.size == 1 or not any(word in first for word in LIBRARIES):
                raise
            raise PeerLost(
                f"rank {self.rank} of {self.size} has lost a mate: {first}", operation="collective"
            ) from error

    def collect(self, shards: Mapping[str, Shard]) -> dict[str, "Tensor"]:
        """The whole tensors that everybody's shards make, on rank 0; nothing on the others.

        Each element must be in one shard of one rank. A tensor that rank 0 has in full is not
        copied. Raises `ValueError` on rank 0 where a part is missing.
        """
        if self.size == 1:
            return assembled(shards.items())
        import torch
        import torch.distributed as dist

        filled = {name: shard for name, shard in shards.items() if shard.values.numel()}
        boxes = self.gather(
            [
                (n, tuple(s.values.shape), s.shape, s.start, s.values.dtype)
                for n, s in filled.items()
            ]
        )
        if self.rank:
            for shard in filled.values():
                dist.send(shard.values.detach().contiguous(), 0)
            return {}

        def arriving() -> Iterator[tuple[str, Shard]]:
            yield from filled.items()
            for rank in range(1, self.size):
                for name, size, shape, start, dtype in boxes[rank]:
                    values = torch.empty(size, dtype=dtype)
                    dist.recv(values, rank)
                    yield name, Shard(values, shape, start)

        return assembled(arriving())

    def close(self) -> None:
        """Leave. The others' calls fail from now on. May be called twice."""
        global _alone
        with _lock:
            joined, self._joined = self._joined, False
            if not joined:
                return
            import torch.distributed as dist

            if self.size == 1:
                _alone -= 1
            if (self.size > 1 or _alone == 0) and dist.is_initialized():
                dist.destroy_process_group()


def _join_alone() -> None:
    dist: Any = importlib.import_module("torch.distributed")

    global _alone
    if _alone == 0:
        dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)
    _alone += 1


def _join(rank: int, size: int, meeting: tuple[str, int, socket.socket | None]) -> None:
    dist: Any = importlib.import_module("torch.distributed")

    host, port, listener = meeting
    patience = datetime.timedelta(seconds=PATIENCE_S)
    descriptor = None if listener is None else listener.detach()
    try:
        store = dist.TCPStore(
            host,
            port,
            world_size=size,
            is_master=listener is not None,
            timeout=datetime.timedelta(seconds=MEET_S),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        dist.init_process_group(
            _backend(), store=store, rank=rank, world_size=size, timeout=patience
        )
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise WorkerError(f"rank {rank} of {size} did not meet the others: {first}") from error


def _backend() -> str:
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _asked(worker: WorkerBase) -> tuple[str, int]:
    """Where rank 0 of this incarnation listens."""
    leader, deadline = f"{worker.id.group}/0", time.monotonic() + MEET_S
    while True:
        try:
            place = worker.endpoint.call(SERVICE, None, to=leader, timeout=MEET_S).result(MEET_S)
        except CommError as error:  # it is being started
            if time.monotonic() > deadline:
                raise WorkerError(f"{worker.id} does not reach {leader}: {error}") from error
        else:
            incarnation, pid, host, port = place
            if pid == os.getpid():
                raise ConfigError(
                    f"{leader} and {worker.id} share a process: several ranks of a trainer need "
                    "launcher=ray"
                )
            if incarnation == worker.context.incarnation:
                return host, port
        time.sleep(ASK_S)
        if time.monotonic() > deadline:
            raise WorkerError(f"{leader} did not come to the meeting within {MEET_S:g} s")
