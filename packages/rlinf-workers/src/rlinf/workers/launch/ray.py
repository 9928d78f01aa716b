"""Processes on a Ray cluster, started here or joined. Ray starts and watches; calls go over comm.

One actor is one process, whose main thread runs one program. A local cluster has no dashboard, no
log forwarding and a temporary folder of its own, and is gone with everything in it after `close`.
"""

import contextlib
import ctypes
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from rlinf.comm import RegistryClient, RegistryServer
from rlinf.comm.host import host_id
from rlinf.workers.devices import Node, node_of
from rlinf.workers.errors import StartError
from rlinf.workers.launch.affinity import pin
from rlinf.workers.launch.base import Ended, Launcher, Link, Process, Program
from rlinf.workers.launch.config import keep_freed_memory, limit_threads, quiet_ray
from rlinf.workers.launch.janitor import Janitor

__all__ = ["RayLauncher"]

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 80 << 20
"""About the least Ray accepts: nothing of ours goes through its object store."""
GONE_S = 10.0
JOIN_S = 120.0
JOIN_HINT = "see that it runs there, in the same version, and that no firewall is between"
KNOCK_S = 5.0
SHORT = 25
SIGACTION_BYTES = 256
"""More than a `struct sigaction` has anywhere."""


class RayLauncher(Launcher):
    """Starts one Ray actor a program.

    Args:
        address: Of a running cluster; empty: start one on this machine, with its end.
        cores: How many CPUs a local cluster says it has.
        show_output: Whether what workers print appears on this terminal.

    Joining waits until the cluster has answered; a local one starts in the background, so that
    whoever starts it can prepare other things meanwhile, and its errors come from `start`. A
    process that is connected to Ray already stays so: that cluster is used, and left as it is.
    """

    def __init__(self, address: str = "", *, cores: int = 1, show_output: bool = False) -> None:
        self._address = address
        self._options = _options(address, cores, show_output)
        self._processes: list[_Actor] = []
        self._nodes: dict[str, str] = {}
        self._ready, self._leaving = threading.Event(), threading.Event()
        self._error: StartError | None = None
        self._guest = False
        server = None if address else RegistryServer(host="127.0.0.1")
        self._folder = "" if address else _folder()
        self._janitor = Janitor(self._folder) if self._folder else None
        self._thread = threading.Thread(target=self._stay, name="rlinf-ray", daemon=True)
        self._thread.start()
        try:
            self._server = server or self._serve()
        except BaseException:
            self._leaving.set()
            raise
        self.registry = self._server

    def _serve(self) -> RegistryServer:
        """The registry on the interface that the other nodes of a joined cluster reach."""
        self._await()
        import ray.util

        host = str(ray.util.get_node_ip_address())
        log.info("the registry listens on %s, the address by which Ray knows this machine", host)
        return RegistryServer(host=host)

    def _stay(self) -> None:
        """Connect, stay until the end, and disconnect: all on one thread.

        The kernel ends Ray's processes when the thread that started them ends.
        """
        try:
            import ray

            self._connect()
        except Exception as error:  # noqa: BLE001 - a thread's edge; raised again by `start`
            what = f"cannot join Ray at {self._address}" if self._address else "cannot start Ray"
            kind = "" if isinstance(error, StartError) else f"{type(error).__name__}: "
            self._error = StartError(f"{what}: {kind}{error}")
            return
        finally:
            self._ready.set()
        self._leaving.wait()
        if not self._guest:
            self._show_janitor()
            ray.shutdown()

    def _connect(self) -> None:
        import ray

        check_address(self._address)
        self._guest = ray.is_initialized()
        if not self._guest:
            with quiet_ray(), _same_sigterm():
                place = {"_temp_dir": self._folder} if self._folder else {}
                ray.init(**self._options, **place)
            _hush()
            if self._folder:
                _end_idle(logs=bool(self._options["log_to_driver"]))
            self._show_janitor()
        alive = [node for node in ray.nodes() if node["Alive"]]
        self._nodes = {node["NodeManagerHostname"]: node["NodeID"] for node in alive}

    def _show_janitor(self) -> None:
        """Let it know Ray's processes: some of them would outlive the others by a minute."""
        if self._janitor is not None:
            children = psutil.Process().children(recursive=True)
            self._janitor.watch(child.pid for child in children)

    def _await(self) -> None:
        if not self._ready.wait(JOIN_S):
            where = f"at {self._address} " if self._address else ""
            raise StartError(f"Ray {where}did not answer within {JOIN_S:g} s: {JOIN_HINT}")
        if self._error is not None:
            raise self._error

    def nodes(self) -> tuple[Node, ...]:
        """The living nodes of the cluster with their CPUs and GPUs."""
        import ray

        self._await()
        found = []
        for node in ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                devices = (("core", int(has.get("CPU", 0))), ("cuda", int(has.get("GPU", 0))))
                found.append(Node(node["NodeManagerHostname"], devices))
        return tuple(found)

    def start(self, program: Program, ended: Ended) -> Process:
        """Start an actor for the program, on the node of its devices."""
        self._await()
        payload = cloudpickle.dumps(program)
        seat = _Seat(
            address=self._server.address,
            token=self._server.token,
            cores=program.cores,
            path=tuple(sys.path),
        )
        node = node_of(program.devices[0]) if program.devices else ""
        if node and node not in self._nodes:
            raise StartError(f"{program.id}: node {node} has left the cluster", worker=program.id)
        actor = _Actor(program.id, self._nodes.get(node), ended)
        actor.start(payload, seat)
        self._processes.append(actor)
        return actor

    def close(self) -> None:
        """Kill what is left, leave the cluster, and end it if it was started here."""
        self._ready.wait(JOIN_S)
        try:
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.join(GONE_S)
        finally:
            self._leaving.set()
            self._thread.join(GONE_S)
            self._server.close()
            if self._janitor is not None:
                self._janitor.close()


@dataclass(frozen=True, slots=True)
class _Seat:
    """What a process needs to know before it can load its program."""

    address: str
    token: bytes
    cores: tuple[int, ...]
    path: tuple[str, ...]

    def take(self) -> Link:
        """Set up this process: memory, affinity, threads, import path."""
        keep_freed_memory()
        allowed = tuple(sorted(os.sched_getaffinity(0)))
        pin(allowed, self.cores)
        limit_threads(max(1, len(self.cores)))
        sys.path.extend(entry for entry in self.path if entry not in sys.path)
        return Link(RegistryClient(self.address, self.token), allowed)


@dataclass(frozen=True, slots=True)
class _Birth:
    """Where a process is: its machine and process-id space, its id, its error output."""

    machine: str
    pid: int
    output: str


class _Host:
    """The actor: one process. `run` keeps its main thread until the program ends."""

    def birth(self) -> _Birth:
        return _Birth(host_id(), os.getpid(), str(Path("/proc/self/fd/2").readlink()))

    def run(self, payload: bytes, seat: _Seat) -> None:
        link = seat.take()
        program: Program = cloudpickle.loads(payload)
        program.run(link)


class _Actor(Process):
    def __init__(self, name: str, node_id: str | None, ended: Ended) -> None:
        self.name, self._node_id, self._ended = name, node_id, ended
        self._birth: _Birth | None = None
        self._actor: Any = None
        self._gone = threading.Event()

    def start(self, payload: bytes, seat: _Seat) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        if self._node_id is not None:
            strategy = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
            options["scheduling_strategy"] = strategy
        self._actor = ray.remote(_Host).options(**options).remote()
        self._actor.birth.remote().future().add_done_callback(self._born)
        running = self._actor.run.options(name=self.name).remote(payload, seat)
        running.future().add_done_callback(self._died)

    def _born(self, future: Any) -> None:
        if future.exception() is None:
            self._birth = future.result()

    def _died(self, future: Any) -> None:
        error, birth = future.exception(), self._birth
        output = birth.output if birth and birth.machine == host_id() else ""
        self._ended("it ended by itself" if error is None else _cause(error, output))
        self._gone.set()  # whoever joins knows by then how it ended

    def kill(self) -> None:
        """Kill the process and forget the actor."""
        import ray

        if self._actor is None or not ray.is_initialized():
            return
        ray.kill(self._actor)
        if self._birth is None or self._gone.is_set() or self._birth.machine != host_id():
            return
        # Ray asks the process to end, which one that is stopped (SIGSTOP) never does.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._birth.pid, signal.SIGKILL)

    def join(self, timeout_s: float) -> bool:
        """Wait until Ray says that it is gone."""
        return self._actor is None or self._gone.wait(timeout_s)


def check_address(address: str) -> None:
    """Knock at the door of a cluster: Ray itself would wait there for minutes.

    Raises:
        StartError: Nobody listens at "host:port".
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
    except OSError as error:
        raise StartError(f"nobody answers ({error.strerror or error}): {JOIN_HINT}") from error


def _options(address: str, cores: int, show_output: bool) -> dict[str, Any]:
    common = {"log_to_driver": show_output, "logging_level": logging.ERROR}
    if address:
        return {"address": address, **common}
    return {
        "address": "local",
        "num_cpus": max(1, cores),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        **common,
    }


def _folder() -> str:
    """A temporary folder whose name leaves room for Ray's sockets, of at most 107 bytes."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="rlinf-", dir=usual if len(usual) < SHORT else "/tmp")


def _cause(error: BaseException, output: str) -> str:
    """How a process ended, in a few words, out of what Ray says and what the process wrote."""
    import ray

    text = str(error)
    if isinstance(error, ray.exceptions.RayTaskError):
        return text.strip().splitlines()[-1]
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "Ray's memory monitor killed it, because its node had run out of memory"
    code = re.search(r"exit code (\d+)", text)
    if code:
        return f"it exited with code {code[1]}"
    crash = re.search(r"\*\*\* (SIG[A-Z]+) received", _read(output))
    if crash:
        return f"it crashed with {crash[1]}"
    if "ray.kill" in text:
        return "it was killed by the controller"
    if "node" in text and "died" in text and "worker process has died" not in text:
        return "its node died"
    return "it was killed from outside (kill -9, or the kernel had run out of memory)"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace") if path else ""
    except OSError:
        return ""


@contextlib.contextmanager
def _same_sigterm() -> Iterator[None]:
    """Keep whatever handles SIGTERM: Ray would print a stack of its own first."""
    libc, action = ctypes.CDLL(None), ctypes.create_string_buffer(SIGACTION_BYTES)
    libc.sigaction(signal.SIGTERM, None, action)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, action, None)


def _hush() -> None:
    """Stop Ray's own announcements of dead workers, a screenful each: their group reports them.

    Ray has no switch for them. Where its internals have moved, they are merely printed again.
    """
    from ray._private import worker

    stop = getattr(worker.global_worker, "threads_stopped", None)
    subscriber = getattr(worker.global_worker, "gcs_error_subscriber", None)
    if stop is not None and subscriber is not None:
        stop.set()
        subscriber.close()


def _end_idle(*, logs: bool) -> None:
    """End those of Ray's own processes that a cluster of one program has no use for: 150 MB.

    They scale clusters, answer requests for jobs and, unless `logs` are wanted, read log files. Ray
    has no switch for them. Where its internals have moved, they stay.
    """
    from ray._private import worker

    node = getattr(worker, "_global_node", None)
    for name in ("monitor", "dashboard", *([] if logs else ["log_monitor"])):
        end = getattr(node, f"kill_{name}", None)
        if end is not None:
            end(check_alive=False)
