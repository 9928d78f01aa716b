"""Ways to get an object into another process, each behind the same three methods.

deliver(obj)  the other process has the object and has said so
ping(data)    the other process has sent 64 bytes back
stream(data, count)  it has received so many small messages, sent one by one, and has said so
"""

import multiprocessing
import os
import socket
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

SPAWN = multiprocessing.get_context("spawn")
SECONDS = 60.0
ACK = b"a" * 64
ECHO, QUIET, LAST, MANY = b"e", b"q", b"l", b"m"


def touch(obj: Any) -> None:
    """Look into every array, so that a lazy transport has to have it."""
    if isinstance(obj, dict):
        for array in obj.values():
            array.reshape(-1)[-1].item()


class Rival:
    """One process and how to talk to it."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self, target: Any, *arguments: object) -> None:
        """Start the other process."""
        self._process = SPAWN.Process(target=target, args=arguments, daemon=True)
        self._process.start()

    def close(self) -> None:
        """End the other process."""
        if self._process is not None:
            self._process.join(SECONDS)
            self._process.terminate()


# -- multiprocessing ------------------------------------------------------------------------------


def serve_pipe(pipe: "Connection[Any, Any]") -> None:
    """The other process of `Pipe`."""
    while True:
        obj = pipe.recv()
        if obj is None:
            return
        if type(obj) is not bytes or not obj.startswith(QUIET):
            touch(obj)
            pipe.send(ACK)


class Pipe(Rival):
    """multiprocessing.Pipe: everything is pickled."""

    def __init__(self) -> None:
        super().__init__()
        self._pipe, there = SPAWN.Pipe()
        self.start(serve_pipe, there)
        self.deliver(ECHO)

    def deliver(self, obj: object) -> None:
        """See the module."""
        self._pipe.send(obj)
        self._pipe.recv()

    ping = deliver

    def stream(self, data: bytes, count: int) -> None:
        """See the module."""
        quiet = QUIET + data[1:]
        for _ in range(count - 1):
            self._pipe.send(quiet)
        self.deliver(LAST + data[1:])

    def close(self) -> None:
        """End the other process."""
        self._pipe.send(None)
        super().close()


# -- a bare Unix socket ---------------------------------------------------------------------------


def serve_socket(path: str) -> None:
    """The other process of `UnixSocket`: packets of up to 64 bytes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    main, _ = listener.accept()
    listener.setblocking(True)
    main.send(ACK)
    while True:
        data = main.recv(64)
        if not data:
            return
        if data.startswith(b"c"):
            peer, _ = listener.accept()
            peer.send(peer.recv(64))
            peer.close()
        elif not data.startswith(QUIET):
            main.send(ACK)


class UnixSocket(Rival):
    """The floor of small messages: one system call each, nothing around it."""

    def __init__(self) -> None:
        super().__init__()
        self._path = f"\0rlinf-benchmark-{os.getpid()}"
        self.start(serve_socket, self._path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connect_when_there()
        self._socket.recv(64)

    def _connect_when_there(self) -> None:
        import time

        deadline = time.monotonic() + SECONDS
        while True:
            try:
                return self._socket.connect(self._path)
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def ping(self, data: bytes) -> None:
        """See the module."""
        self._socket.send(data)
        self._socket.recv(64)

    def stream(self, data: bytes, count: int) -> None:
        """See the module."""
        quiet = QUIET + data[1:]
        for _ in range(count - 1):
            self._socket.send(quiet)
        self.ping(data)

    def meet(self) -> None:
        """Connect anew, there and back."""
        self._socket.send(b"c")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(self._path)
            peer.send(ACK)
            peer.recv(64)

    def close(self) -> None:
        """End the other process."""
        self._socket.close()
        super().close()


# -- a plain TCP socket --------------------------------------------------------------------------


def fill(sock: socket.socket, memory: memoryview) -> bool:
    """Read so many bytes; False where the peer is gone."""
    while memory.nbytes:
        count = sock.recv_into(memory)
        if not count:
            return False
        memory = memory[count:]
    return True


def serve_tcp(port: int) -> None:
    """The other process of `TcpSocket`: is told how many buffers of what size will come."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    order = np.zeros(2, np.int64)
    kept: dict[tuple[int, int], list[memoryview]] = {}
    while fill(sock, order.data.cast("B")):
        count, size = order.tolist()
        if (count, size) not in kept:
            kept[count, size] = [np.zeros(size, np.uint8).data for _ in range(count)]
        for memory in kept[count, size]:
            if not fill(sock, memory):
                return
        sock.sendall(ACK)


class TcpSocket(Rival):
    """The shortest script: buffers as they lie, into memory that is already there."""

    def __init__(self) -> None:
        super().__init__()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.start(serve_tcp, listener.getsockname()[1])
            self._socket, _ = listener.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def deliver(self, obj: dict[str, Any]) -> None:
        """See the module; the names are known beforehand."""
        size = next(iter(obj.values())).nbytes
        self._socket.sendall(np.array([len(obj), size]).tobytes())
        for array in obj.values():
            self._socket.sendall(array.data.cast("B"))
        fill(self._socket, memoryview(bytearray(len(ACK))))

    def close(self) -> None:
        """End the other process."""
        self._socket.close()
        super().close()


# -- gloo -----------------------------------------------------------------------------------------


def join_gloo(store: str, rank: int) -> Any:
    """Make the group of two."""
    import torch.distributed as distributed

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return distributed


def serve_gloo(store: str) -> None:
    """The other process of `Gloo`: is told how many tensors of how many floats will come."""
    import torch

    gloo = join_gloo(store, 1)
    ack, order = torch.zeros(64, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    kept: dict[tuple[int, int], list[Any]] = {}
    while True:
        gloo.recv(order, 0)
        count, size = order.tolist()
        if count < 0:
            return
        if count == 0:
            gloo.recv(ack, 0)
        elif (count, size) not in kept:
            kept[count, size] = [torch.zeros(size) for _ in range(count)]
        for tensor in kept.get((count, size), ()):
            gloo.recv(tensor, 0)
        gloo.send(ack, 0)


class Gloo(Rival):
    """torch.distributed over gloo, tensor by tensor into memory that is already there."""

    def __init__(self) -> None:
        import torch

        super().__init__()
        self._torch = torch
        store = str(Path(tempfile.mkdtemp()) / "store")
        self.start(serve_gloo, store)
        self._gloo = join_gloo(store, 0)
        self._ack = torch.zeros(64, dtype=torch.uint8)

    def _order(self, count: int, size: int) -> None:
        self._gloo.send(self._torch.tensor([count, size]), 1)

    def deliver(self, obj: dict[str, Any]) -> None:
        """See the module; what is where is known beforehand."""
        tensors = [self._torch.from_numpy(array).reshape(-1) for array in obj.values()]
        self._order(len(tensors), tensors[0].numel())
        for tensor in tensors:
            self._gloo.send(tensor, 1)
        self._gloo.recv(self._ack, 1)

    def ping(self, data: bytes) -> None:
        """See the module."""
        self._order(0, 0)
        self._gloo.send(self._ack, 1)
        self._gloo.recv(self._ack, 1)

    def close(self) -> None:
        """End the other process."""
        self._order(-1, 0)
        super().close()
        self._gloo.destroy_process_group()


# -- ray ------------------------------------------------------------------------------------------


class Ray:
    """ray.put, and an actor that gets it."""

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray

        class There:
            def take(self, refs: list[Any]) -> bytes:
                obj = ray.get(refs[0])
                for array in obj.values():
                    array.reshape(-1)[-1].item()
                return ACK

            def echo(self, data: bytes) -> bytes:
                return ACK

        self._ray = ray
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=1 << 30,
        )
        self._there = ray.remote(num_cpus=0)(There).remote()
        self.ping(ACK)

    def deliver(self, obj: dict[str, Any]) -> None:
        """See the module."""
        self._ray.get(self._there.take.remote([self._ray.put(obj)]))

    def ping(self, data: bytes) -> None:
        """See the module."""
        self._ray.get(self._there.echo.remote(data))

    def stream(self, data: bytes, count: int) -> None:
        """See the module."""
        self._ray.get([self._there.echo.remote(data) for _ in range(count)][-1])

    def close(self) -> None:
        """Shut the cluster down."""
        self._ray.shutdown()


class Copy:
    """The floor of large messages: the bytes copied once, within one process, to used memory."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, Any]] = {}

    def deliver(self, obj: dict[str, Any]) -> None:
        """See the module."""
        size = next(iter(obj.values())).nbytes
        if size not in self._kept:
            self._kept[size] = {name: np.empty_like(array) for name, array in obj.items()}
        for name, array in obj.items():
            np.copyto(self._kept[size][name], array)
