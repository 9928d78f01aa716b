"""Carries out what `supervision` decides: starts, pings, kills and restarts, sends calls.

Events come from many threads (callers, dispatching threads, the launcher's watch); each is stepped
under a lock, and the commands that follow are carried out in order, by one thread at a time and
outside the lock. Starting and killing, which may take a while, go to a thread of their own.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlinf.channel.life import WorkerLife
from rlinf.comm import CommError, Endpoint, Event, Handle, Lost, Request
from rlinf.comm.endpoint import handle_of
from rlinf.comm.errors import CodecError, RemoteError
from rlinf.workers import incidents
from rlinf.workers import supervision as sv
from rlinf.workers.chronicle import Chronicle
from rlinf.workers.errors import Aborted, ClusterClosed, StartError, WorkerError
from rlinf.workers.launch.base import Launcher, Process, Program
from rlinf.workers.messages import (
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

__all__ = ["Controller", "Factory"]

log = logging.getLogger(__name__)

Factory = Callable[[int], Program]
"""Makes the program of a worker's incarnation."""
RESTORE = "restore"
"""The method that gives a worker its state, after which it takes other calls again."""
LAST_WORDS_S = 5.0
"""How long to wait for the launcher's account of a death before making do with our own."""


@dataclass(slots=True)
class _Seat:
    """A worker's place: how to make its program, and what was started of it."""

    factory: Factory
    started: Handle[None]
    process: Process | None = None
    incarnation: int = -1
    epoch: int = 0
    pulse: Pulse | None = None


@dataclass(slots=True)
class _Pending:
    """A call somebody waits for."""

    worker: str
    call: Call | Move | Leave
    handle: Handle[Any]
    since: float
    value: Any = None
    error: BaseException | None = None


class Controller:
    """Supervises the workers of one job from the process that started it.

    Args:
        endpoint: Of this process; serves "controller" from now on.
        launcher: Starts and kills.
        limits: Deadlines.
        chronicle: Is told who starts and who dies.
    """

    def __init__(
        self, endpoint: Endpoint, launcher: Launcher, limits: sv.Limits, chronicle: Chronicle
    ) -> None:
        self._endpoint, self._launcher, self._chronicle = endpoint, launcher, chronicle
        self._core = sv.Supervision(limits)
        self._seats: dict[str, _Seat] = {}
        self._calls: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._commands: deque[incidents.Command] = deque()
        self._carrying = False
        self._closed = threading.Event()
        self._hands = ThreadPoolExecutor(1, thread_name_prefix="rlinf-launch")
        self._clock = threading.Thread(target=self._tick, name="rlinf-supervision", daemon=True)
        endpoint.add_sink(self._watch)
        endpoint.serve("controller", self._hello)
        self._clock.start()

    # -- for groups and the cluster ---------------------------------------------------------------

    @property
    def failure(self) -> WorkerError | None:
        """Why the job was stopped; None while it was not."""
        return self._core.stopped

    def statistics(self) -> tuple[sv.WorkerStatistics, ...]:
        """Every worker as it is now, the channel server first."""
        with self._lock:
            return self._core.statistics(time.monotonic())

    def lives(self) -> tuple[WorkerLife, ...]:
        """The same for whoever looks from outside, with what each is doing."""
        oldest = {pending.worker: pending for pending in reversed(list(self._calls.values()))}
        return tuple(self._life(one, oldest.get(one.worker)) for one in self.statistics())

    def _life(self, one: sv.WorkerStatistics, oldest: _Pending | None) -> WorkerLife:
        seat = self._seats.get(one.worker)
        pulse = seat.pulse if seat is not None and seat.pulse is not None else Pulse((), 0, 0.0)
        return WorkerLife(
            id=one.worker,
            running=one.running,
            restarts=one.incarnation,
            pid=one.pid or 0,
            heard_s=one.silent_s,
            beat_s=self._core.limits.heartbeat_s,
            devices=pulse.devices,
            rss_bytes=pulse.rss_bytes,
            cpu_s=pulse.cpu_s,
            calls=one.calls,
            doing=oldest.call.method if oldest is not None else "",
            doing_s=time.monotonic() - oldest.since if oldest is not None else 0.0,
        )

    def join(self, worker: str, restarts: int, factory: Factory, unit: str = "") -> None:
        """Start a worker and look after it from now on; see `supervision.Join`. Returns at once."""
        limit = self._core.limits.start_s
        self._seats[worker] = _Seat(factory, Handle(f"start of {worker}", timeout_s=limit))
        self._step(incidents.Join(worker, restarts, unit))

    def started(self, worker: str) -> Handle[None]:
        """Done once the worker has started for the first time; fails with the job's failure."""
        return self._seats[worker].started

    def submit(self, worker: str, call: Call | Move | Leave, what: str) -> Handle[Any]:
        """Call a worker, as soon as it has started; sent again should it die and be restarted.

        The handle fails with what the method raised, `WorkerDied`, `Aborted` or `ClusterClosed`.
        """
        closed = self._closed.is_set()
        handle = Handle(what) if closed else handle_of(self._endpoint, what, timeout=None)
        self._calls[call.number] = _Pending(worker, call, handle, time.monotonic())
        if self._closed.is_set():
            self._fail(call.number, ClusterClosed(f"{what}: the cluster is closed"))
        else:
            restores = isinstance(call, Call) and call.method == RESTORE
            stateless, leaves = not isinstance(call, Call), isinstance(call, Leave)
            self._step(incidents.Submit(worker, call.number, restores, stateless, leaves))
        return handle

    def leave(self, worker: str) -> Handle[Any]:
        """Have a worker end once it has done what it was asked before; done when it has."""
        handle = self.submit(worker, Leave(self.number()), f"{worker} leaves")

        def left(_: Handle[Any]) -> None:
            self._tell(worker, Shutdown())
            self._hands_do(self._bury, worker)

        handle.add_done_callback(left)
        return handle

    def number(self) -> int:
        """A call number that was not used before."""
        return next(self._numbers)

    def abort(self, number: int, because: str) -> None:
        """Ask the worker to give up a call; its handle fails with `Aborted` at once."""
        pending = self._calls.get(number)
        if pending is None:
            return
        text = f"{pending.worker}.{pending.call.method} was given up: {because}"
        pending.handle.set_error(Aborted(text, worker=pending.worker, because=because))
        self._step(incidents.Forget(pending.worker, number))
        self._calls.pop(number, None)
        if self._core.is_running(pending.worker):
            self._tell(pending.worker, Abort(number, because))

    def close(self, grace_s: float) -> None:
        """End all workers: ask them, wait so long, then kill what is left. Pending calls fail."""
        if self._closed.is_set():
            return
        self._closed.set()
        for number, pending in list(self._calls.items()):
            text = f"{pending.handle.what}: the cluster was closed before it was done"
            self._fail(number, ClusterClosed(text))
        if self.failure is None:
            for worker in self._seats:
                if self._core.is_running(worker):
                    self._tell(worker, Shutdown())
        else:
            grace_s = 0.0
        self._hands.shutdown(wait=True, cancel_futures=True)
        deadline = time.monotonic() + grace_s
        for process in [seat.process for seat in self._seats.values()]:
            left = max(0.0, deadline - time.monotonic())
            if process is not None and not process.join(left):
                process.kill()
        self._clock.join()

    def _bury(self, worker: str) -> None:
        seat = self._seats.pop(worker, None)
        if seat is not None and seat.process is not None:
            seat.process.join(LAST_WORDS_S)
            seat.process.kill()  # its program has ended; what hosted it may still be there

    # -- what comes in ----------------------------------------------------------------------------

    def _hello(self, request: Request) -> None:
        hello: Hello = request.payload
        seat = self._seats[hello.worker]
        if self._closed.is_set():
            request.fail(ClusterClosed(f"{hello.worker}: the cluster was closed while it started"))
            return
        request.reply(None)
        if hello.fault is not None:
            died = incidents.Died(hello.worker, hello.incarnation, str(hello.fault), hello.fault)
            self._step(died)
            return
        if hello.incarnation == seat.incarnation:
            seat.epoch = request.epoch
        seat.started.set_result(None)
        self._chronicle.note("started", hello.worker, f"{hello.worker} runs, process {hello.pid}")
        started = incidents.Started(hello.worker, hello.incarnation, hello.pid, request.epoch)
        self._step(started)

    def _watch(self, event: Event) -> None:
        if not isinstance(event, Lost):
            return
        cause = f"its connection broke ({event.reason})"
        self._hands_do(self._lost, incidents.Broke(str(event.peer), event.epoch, cause))

    def _lost(self, event: incidents.Broke | incidents.Died) -> None:
        seat = self._seats.get(event.worker)
        if seat is None or self._closed.is_set():
            return
        if isinstance(event, incidents.Broke):
            is_this = event.epoch == seat.epoch
        else:
            is_this = event.incarnation == seat.incarnation
        if is_this and seat.process is not None:
            seat.process.join(LAST_WORDS_S)  # the launcher knows better how it ended
        self._step(event)

    def _tick(self) -> None:
        while not self._closed.wait(self._core.limits.heartbeat_s):
            self._step(incidents.Tick())

    def _step(self, event: incidents.Event) -> None:
        with self._lock:
            self._commands.extend(self._core.step(event, time.monotonic()))
        self._carry_out()

    # -- what goes out ----------------------------------------------------------------------------

    def _carry_out(self) -> None:
        while True:
            with self._lock:
                if self._carrying or not self._commands:
                    return
                self._carrying = True
                command = self._commands.popleft()
            try:
                self._do(command)
            finally:
                with self._lock:
                    self._carrying = False

    def _do(self, command: incidents.Command) -> None:
        if isinstance(command, incidents.Send):
            self._send(command)
        elif isinstance(command, incidents.Release):
            self._release(command.call)
        elif isinstance(command, incidents.Fail):
            self._fail(command.call, command.error)
        elif isinstance(command, incidents.Launch):
            if command.incarnation:
                text = f"{command.worker} died: {command.cause}. It is started again"
                log.warning(text)
                self._chronicle.note("died", command.worker, text)
            self._hands_do(self._launch, command)
        elif isinstance(command, incidents.Kill):
            self._hands_do(self._kill, command.worker)
        elif isinstance(command, incidents.Ping):
            self._ping(command)
        else:
            log.debug("the job was stopped: %s", command.error)
            self._chronicle.note("stopped", "", str(command.error))
            for worker, seat in self._seats.items():
                seat.started.set_error(command.error)
                self._hands_do(self._kill, worker)

    def _send(self, command: incidents.Send) -> None:
        pending = self._calls.get(command.call)
        if pending is None:
            return
        try:
            answer = self._endpoint.call(SERVICE, pending.call, to=command.worker, timeout=None)
        except CommError as error:  # such as an argument that cannot be encoded
            self._conclude(command, pending, None, error)
            return
        answer.add_done_callback(lambda done: self._answered(command, pending, done))

    def _answered(self, command: incidents.Send, pending: _Pending, done: Handle[Any]) -> None:
        error = done.exception()
        self._conclude(command, pending, done.result(0) if error is None else None, error)

    def _conclude(
        self, command: incidents.Send, pending: _Pending, value: Any, error: BaseException | None
    ) -> None:
        if isinstance(error, CommError) and not isinstance(error, (CodecError, RemoteError)):
            cause = f"its connection broke ({error})"
            died = incidents.Died(command.worker, command.incarnation, cause)
            broke = incidents.Broke(command.worker, getattr(error, "epoch", None) or 0, cause)
            self._hands_do(self._lost, broke if broke.epoch else died)
            return
        pending.value, pending.error = value, error
        self._step(incidents.Answered(command.worker, command.incarnation, command.call))

    def _release(self, number: int) -> None:
        pending = self._calls.pop(number, None)
        if pending is None:
            return
        if pending.error is None:
            pending.handle.set_result(pending.value)
            return
        trace = getattr(pending.error, "traceback", None)
        if trace:
            pending.error.add_note(f"traceback on {pending.worker}:\n{trace}")
        pending.handle.set_error(pending.error)

    def _fail(self, number: int, error: WorkerError) -> None:
        pending = self._calls.pop(number, None)
        if pending is not None:
            pending.handle.set_error(error)

    def _ping(self, command: incidents.Ping) -> None:
        heard = incidents.Heard(command.worker, command.incarnation)

        def answered(done: Handle[Any]) -> None:
            if done.exception() is None:
                seat = self._seats.get(command.worker)
                if seat is not None:
                    seat.pulse = done.result(0)
                self._step(heard)

        self._tell(command.worker, Probe(), answered)

    def _tell(
        self, worker: str, message: object, then: Callable[[Handle[Any]], None] | None = None
    ) -> None:
        """Send what the worker's dispatching thread answers; a failure shows in supervision."""
        with contextlib.suppress(CommError):
            limit = self._core.limits.silence_s
            answer = self._endpoint.call(SERVICE, message, to=worker, timeout=limit)
            if then is not None:
                answer.add_done_callback(then)

    # -- on the launching thread ------------------------------------------------------------------

    def _hands_do(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # raised once the cluster is being closed
            self._hands.submit(function, *args)

    def _launch(self, command: incidents.Launch) -> None:
        seat = self._seats[command.worker]

        def ended(cause: str) -> None:
            if not self._closed.is_set():
                self._step(incidents.Died(command.worker, command.incarnation, cause))

        if self.failure is not None:
            return
        seat.process, seat.incarnation, seat.epoch = None, command.incarnation, 0
        try:
            seat.process = self._launcher.start(seat.factory(command.incarnation), ended)
        except Exception as error:  # noqa: BLE001 - a thread's edge; becomes the job's failure
            text = (
                str(error) if isinstance(error, StartError) else f"{type(error).__name__}: {error}"
            )
            fault = StartError(f"{command.worker} was not started: {text}", worker=command.worker)
            self._step(incidents.Died(command.worker, command.incarnation, str(fault), fault))

    def _kill(self, worker: str) -> None:
        seat = self._seats.get(worker)
        if seat is not None and seat.process is not None:
            seat.process.kill()
