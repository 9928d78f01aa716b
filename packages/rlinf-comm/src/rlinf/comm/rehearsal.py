"""Rehearsal: fakes, and peers in threads and processes, to test against."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import ClassVar

from rlinf.comm.address import Address
from rlinf.comm.config import CommConfig
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.frame import PAYLOAD, Outgoing
from rlinf.comm.registry_server import RegistryClient, RegistryServer
from rlinf.comm.transports.base import Link, small
from rlinf.comm.transports.tcp import TcpLink, TcpTransport

PATIENCE_S = 20.0

Program = Callable[..., None]


class FakeClock:
    """A clock that goes only where it is told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let that much time pass."""
        self.now += seconds


def eventually(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Return as soon as the condition holds.

    Raises:
        AssertionError: It does not within that time.
    """
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        pause.wait(0.005)


class LossyLink(TcpLink):
    """A TCP link that breaks after a number of payload frames."""

    transport = "lossy"

    def send(self, frame: Outgoing) -> bool:
        """Count; break instead of sending the last one, which is lost without a word."""
        if frame.kind in PAYLOAD:
            LossyTransport.left -= 1
            if LossyTransport.left == 0:
                self.unsent.append(frame)
                self.close("lossy: this link was made to break")
                return True
        return super().send(frame)

    def send_small(self, tag: int, flags: int, header: bytes) -> bool:
        """Count these as well."""
        return self.send(small(tag, flags, header))


class LossyTransport(TcpTransport):
    """TCP whose links break: set `LossyTransport.left` to the number of the frame that is lost.

    To be used by a test: `plugins.register(LossyTransport)` and `backend_priority=("lossy",)`.
    """

    name = "lossy"
    scheme = "lossy"
    left: ClassVar[int] = 0

    def listen(self) -> Address:
        """As TCP, under this scheme."""
        address = super().listen()
        return Address("lossy", host=address.host, port=address.port)

    def link(self, sock: socket.socket, *, dialled: bool) -> Link:
        """One of ours."""
        return LossyLink(sock, self.surroundings, dialled=dialled)


class PeerProcess:
    """A worker in a process of its own: runs `program(endpoint, *args)`, then closes it.

    Args:
        name: The worker's id.
        registry: The server it registers with.
        program: A function that a fresh process can import.
        args: Its further arguments.
        config: The endpoint's settings.
    """

    def __init__(
        self,
        name: str,
        registry: RegistryServer,
        program: Program,
        *args: object,
        config: CommConfig | None = None,
    ) -> None:
        self.name = name
        self._process = get_context("spawn").Process(
            target=_run_peer,
            args=(name, registry.address, registry.token, program, args, config),
            daemon=True,
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join(PATIENCE_S)

    def join(self) -> int | None:
        """Wait for its end; returns the exit code."""
        self._process.join(PATIENCE_S)
        return self._process.exitcode

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(PATIENCE_S)
        self._process.close()


class PeerThread:
    """The same in a thread of this process."""

    def __init__(
        self,
        name: str,
        registry: RegistryServer,
        program: Program,
        *args: object,
        config: CommConfig | None = None,
    ) -> None:
        self.name = name
        self._endpoint = Endpoint(name, registry=registry, config=config)
        self._thread = threading.Thread(target=self._run, args=(program, args), daemon=True)
        self._thread.start()

    def _run(self, program: Program, args: tuple[object, ...]) -> None:
        with self._endpoint:
            program(self._endpoint, *args)

    def join(self) -> int | None:
        """Wait for its end."""
        self._thread.join(PATIENCE_S)
        return None if self._thread.is_alive() else 0

    def __enter__(self) -> "PeerThread":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._endpoint.close()
        self._thread.join(PATIENCE_S)
        self._endpoint.close()


def _run_peer(
    name: str,
    address: str,
    token: bytes,
    program: Program,
    args: tuple[object, ...],
    config: CommConfig | None,
) -> None:
    with Endpoint(name, registry=RegistryClient(address, token), config=config) as endpoint:
        program(endpoint, *args)


@contextmanager
def worker(
    name: str, registry: RegistryServer, config: CommConfig | None = None
) -> Iterator[Endpoint]:
    """An endpoint of this process that talks to the registry like one of another would."""
    client = RegistryClient(registry.address, registry.token)
    with Endpoint(name, registry=client, config=config) as endpoint:
        yield endpoint
