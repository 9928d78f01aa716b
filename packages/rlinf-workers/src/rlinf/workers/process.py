"""What runs in a worker's process: the worker, its endpoint and the loop over its calls.

The main thread constructs the worker, says hello to the controller, and then carries out calls one
after another. The thread that dispatches for the endpoint queues them, and answers `Probe`,
`Abort` and `Shutdown` itself, and calls of methods marked `at_once`: a busy worker still answers.
"""

import contextlib
import logging
import os
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.comm import (
    CommConfig,
    CommError,
    Device,
    Endpoint,
    Event,
    Handle,
    Lost,
    Request,
    WorkerId,
)
from rlinf.comm import Timeout as CommTimeout
from rlinf.comm.endpoint import handle_of
from rlinf.workers.base import Context, WorkerBase
from rlinf.workers.errors import Aborted, CallError, StageError, StartError, WorkerError
from rlinf.workers.flow import StageRunner
from rlinf.workers.launch.affinity import pin
from rlinf.workers.launch.base import Link
from rlinf.workers.launch.threads import end_threads
from rlinf.workers.messages import (
    CONTROLLER,
    SERVICE,
    Abort,
    Call,
    Hello,
    Leave,
    Move,
    Probe,
    Pulse,
    Shutdown,
)
from rlinf.workers.stages import is_at_once
from rlinf.workers.tracing import traced_communication

__all__ = ["WorkerProgram"]

log = logging.getLogger(__name__)

HELLO_S = 60.0
IDLE_S = 600.0
"""How often a worker that is not called looks again."""
FRAMES = 6
FRAMEWORK = {str(Path(__file__).with_name(name)) for name in ("process.py", "flow.py")}


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """One incarnation of a worker, as it is sent to its process.

    Attributes:
    """

    id: str
    cls: type[WorkerBase]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    world_size: int
    context: Context
    comm: CommConfig | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        """Its rank's devices."""
        return self.context.devices

    @property
    def cores(self) -> tuple[int, ...]:
        """Those of them that are CPU cores."""
        return self.context.place.cores

    def run(self, link: Link) -> None:
        """Construct the worker and serve its calls until `Shutdown` or until nobody is left."""
        _set_torch_threads(self.context.place.threads)
        with (
            Endpoint(
                self.id, registry=link.registry, config=self.comm, device=_device(self.devices)
            ) as endpoint,
            traced_communication(endpoint),
        ):
            _Loop(self, endpoint, link.cores).run()


class _Loop:
    """Calls, one after another."""

    def __init__(
        self, program: WorkerProgram, endpoint: Endpoint, allowed: tuple[int, ...]
    ) -> None:
        self._program, self._endpoint, self._allowed = program, endpoint, allowed
        self._lock = threading.Lock()
        self._inbox: deque[Request | None] = deque()
        self._awaited: Handle[None] | None = None
        self._aborted: dict[int, str] = {}
        self._ending = ""
        self._worker: WorkerBase | None = None
        self._runner: StageRunner | None = None
        endpoint.add_sink(self._watch)
        endpoint.serve(SERVICE, self._receive)

    def run(self) -> None:
        fault = self._construct()
        hello = Hello(self._program.id, self._program.context.incarnation, os.getpid(), fault)
        self._endpoint.call("controller", hello, to=CONTROLLER, timeout=HELLO_S).result(HELLO_S)
        if fault is not None:
            return
        while not self._ending:
            request = self._next()
            if request is not None:
                self._execute(request)
        assert self._worker is not None
        self._worker.close()

    # -- on the dispatching thread ----------------------------------------------------------------

    def _receive(self, request: Request) -> None:
        message = request.payload
        if isinstance(message, Probe):
            worker = self._worker
            request.reply(Pulse.now(worker.context.devices if worker else self._program.devices))
            return
        if isinstance(message, Call | Move | Leave):
            if is_at_once(self._program.cls, message.method):
                self._execute(request)
            else:
                self._put(request)
            return
        if isinstance(message, Abort):
            with self._lock:
                self._aborted[message.number] = message.because
        elif isinstance(message, Shutdown):
            self._end("the worker was told to shut down")
        else:
            raise CallError(f"{self._program.id} cannot make sense of {type(message).__name__}")
        request.reply(None)

    def _watch(self, event: Event) -> None:
        if isinstance(event, Lost) and event.peer == CONTROLLER:
            self._end("the controller is gone")

    def _end(self, why: str) -> None:
        self._ending = why
        self._put(None)

    def _put(self, request: Request | None) -> None:
        with self._lock:
            self._inbox.append(request)
            awaited, self._awaited = self._awaited, None
        if awaited is not None:
            awaited.set_result(None)

    # -- on the main thread -----------------------------------------------------------------------

    def _next(self) -> Request | None:
        """The next call. Who waits for one reads the sockets: no other thread is in between."""
        while True:
            with self._lock:
                if self._inbox:
                    return self._inbox.popleft()
                self._awaited = awaited = handle_of(self._endpoint, "a call")
            with contextlib.suppress(CommTimeout):
                awaited.wait(IDLE_S)

    def _construct(self) -> StartError | None:
        program = self._program
        try:
            worker = program.cls.__new__(program.cls)
            worker.endpoint, worker.id = self._endpoint, WorkerId.parse(program.id)
            worker.rank, worker.world_size = worker.id.rank, program.world_size
            worker.context = program.context
            worker.__init__(*program.args, **program.kwargs)  # type: ignore[misc]
            _set_torch_threads(program.context.place.threads)
            self._worker = worker
            self._runner = StageRunner(worker)
            if program.context.incarnation or program.context.late:
                worker.recovered()
        except Exception as error:  # noqa: BLE001 - the edge of a process; goes to the controller
            name = program.cls.__name__
            text = f"{program.id}: constructing {name} raised {_describe(error)}"
            return StartError(text, worker=program.id, traceback=_short_traceback(error))
        return None

    def _execute(self, request: Request) -> None:
        call: Call | Move | Leave = request.payload
        if isinstance(call, Leave):
            request.reply(None)
            return
        try:
            value = self._call(call) if isinstance(call, Call) else self._move(call)
        except WorkerError as error:
            request.fail(error)
        except Exception as error:  # noqa: BLE001 - the edge of a process; goes to the caller
            request.fail(self._error(call, error))
        else:
            try:
                request.reply(value)
            except CommError as error:
                log.warning(
                    "%s.%s: its result was not sent: %s", self._program.id, call.method, error
                )
        finally:
            end_threads()
            with self._lock:
                self._aborted.pop(call.number, None)

    def _move(self, move: Move) -> str:
        """Compute elsewhere: the state goes along, nothing else of it changes.

        Returns the name of the node, which stays the same.
        """
        worker, place = self._worker, move.place
        assert worker is not None
        worker.world_size = move.world_size or worker.world_size
        if place.devices != worker.context.devices:
            if self._allowed:
                pin(self._allowed, place.cores)
            _set_torch_threads(place.threads)
        if place.shared and not worker.context.place.shared:
            worker.offload()
        elif worker.context.place.shared and not place.shared:
            worker.onload()
        worker.context = replace(worker.context, place=place)
        self._runner = StageRunner(worker)
        return socket.gethostname()

    def _call(self, call: Call) -> Any:
        assert self._worker is not None and self._runner is not None
        if call.flow is None:
            value = getattr(self._worker, call.method)(*call.args, **(call.kwargs or {}))
            return list(value) if isinstance(value, Iterator) else value
        return self._runner.run(call, lambda: self._check(call))

    def _check(self, call: Call) -> None:
        """Raise `Aborted` where the call is to be given up."""
        with self._lock:
            because = self._aborted.get(call.number) or self._ending
        if because:
            text = f"{self._program.id}.{call.method} was given up: {because}"
            raise Aborted(text, worker=self._program.id, because=because)

    def _error(self, call: Call | Move, error: Exception) -> CallError:
        is_stage = isinstance(call, Call) and call.flow is not None
        kind = StageError if is_stage else CallError
        return kind(
            f"{self._program.id}.{call.method} raised {_describe(error)}",
            worker=self._program.id,
            method=call.method,
            kind=type(error).__name__,
            traceback=_short_traceback(error),
        )


def _describe(error: BaseException) -> str:
    """The error on one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _short_traceback(error: BaseException) -> str:
    """The last frames of the user's code, without ours."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in FRAMEWORK]
    lines = traceback.format_list(frames[-FRAMES:])
    return "".join([*lines, *traceback.format_exception_only(error)])


def _device(devices: tuple[str, ...]) -> Device | None:
    """The device that the endpoint tells others about: the first accelerator."""
    for device in devices:
        kind, _, index = device.rpartition("/")[2].partition(":")
        if kind != "core":
            return Device(kind, int(index))
    return None


def _set_torch_threads(threads: int) -> None:
    if "torch" not in sys.modules:
        return
    import torch  # waits for another thread that is in the middle of importing it

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
