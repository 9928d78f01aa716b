"""Who lives, who is restarted, which call goes where and when the job is over. No I/O.

`Supervision.step(event, now) -> commands`. Every call is held here until a worker has answered
it, and is sent again to the next incarnation if its worker dies before that. So a call to a
restartable worker is carried out at least once, and the results of exactly one run are returned;
what a stage had committed before is not leased again.

A worker that holds state belongs to a unit (`Join.unit`): with one of them all ranks of the unit
start again, and their calls fail with `StateLost`, also later ones, until one says `restores`.

Incarnations are counted 0, 1, 2 ... a worker; an event about an older one is ignored. `now` is in
seconds on the caller's monotonic clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rlinf.workers.errors import StartError, StateLost, WorkerDied, WorkerError
from rlinf.workers.incidents import (
    Answered,
    Broke,
    Command,
    Died,
    Event,
    Fail,
    Forget,
    Heard,
    Join,
    Kill,
    Launch,
    Ping,
    Release,
    Send,
    Started,
    Stop,
    Submit,
    Tick,
)

__all__ = ["Limits", "Supervision", "WorkerStatistics"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines of supervision.

    Attributes:
        start_s: From launch until the worker is constructed and has said so.
        silence_s: Without an answer to a ping for this long, a worker counts as dead.
        heartbeat_s: How often `Tick` comes, and each worker is pinged.
    """

    start_s: float = 180.0
    silence_s: float = 30.0
    heartbeat_s: float = 2.0


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """One worker at one moment.

    Attributes:
        incarnation: Restarts so far.
        running: Whether it takes calls; else it is being started.
        pid: Its process; None while it is being started.
        deaths: In a row, with no call done in between.
        calls: Not yet answered.
        silent_s: Since its last sign of life, or since it is being started.
    """

    worker: str
    incarnation: int
    running: bool
    pid: int | None
    deaths: int
    calls: int
    silent_s: float


@dataclass(slots=True)
class _Member:
    """One worker, whatever its incarnation."""

    restarts: int
    since: float
    unit: str = ""
    lost: StateLost | None = None
    """Its state is gone and nobody has begun to bring it back."""
    incarnation: int = 0
    pid: int | None = None
    epoch: int = 0
    running: bool = False
    deaths: int = 0
    """In a row: a call that is done sets it back."""
    heard: float = 0.0
    pinged: bool = False
    leaves: int | None = None
    """The call with which it ends."""
    calls: dict[int, bool] = field(default_factory=dict)
    """Not yet answered, in order of submission, and whether each is `stateless`."""


class Supervision:
    """The state of a job's workers. Not thread-safe: one thread at a time may step it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._members: dict[str, _Member] = {}
        self._stopped: WorkerError | None = None
        self._ticked: float | None = None

    @property
    def stopped(self) -> WorkerError | None:
        """Why the job is over; None while it is not."""
        return self._stopped

    def statistics(self, now: float) -> tuple[WorkerStatistics, ...]:
        """Every worker as it is now, in order of joining."""
        return tuple(
            WorkerStatistics(
                worker,
                m.incarnation,
                m.running,
                m.pid,
                m.deaths,
                len(m.calls),
                now - (m.heard if m.running else m.since),
            )
            for worker, m in self._members.items()
        )

    def is_running(self, worker: str) -> bool:
        """Whether its current incarnation takes calls."""
        member = self._members.get(worker)
        return member is not None and member.running

    def step(self, event: Event, now: float) -> list[Command]:
        """Take in one event and say what to do, in that order."""
        if self._stopped is not None:
            return [Fail(event.call, self._stopped)] if isinstance(event, Submit) else []
        return list(self._step(event, now))

    def _step(self, event: Event, now: float) -> Iterator[Command]:
        if isinstance(event, Tick):
            yield from self._tick(now)
        elif isinstance(event, Join):
            member = _Member(restarts=event.restarts, since=now, unit=event.unit)
            self._members[event.worker] = member
            yield Launch(event.worker, 0)
        elif event.worker not in self._members:
            if isinstance(event, Submit):
                yield Fail(event.call, _gone(event.worker))
        elif isinstance(event, Submit):
            yield from self._submit(event, self._members[event.worker])
        elif isinstance(event, Forget):
            self._members[event.worker].calls.pop(event.call, None)
        elif isinstance(event, Broke):
            member = self._members[event.worker]
            if member.running and member.epoch == event.epoch:
                died = Died(event.worker, member.incarnation, event.cause)
                yield from self._die(died, member, now)
        else:
            member = self._members[event.worker]
            if event.incarnation != member.incarnation:
                return
            if isinstance(event, Started):
                yield from self._start(event, member, now)
            elif isinstance(event, Answered):
                yield from self._answer(event, member, now)
            elif isinstance(event, Heard):
                member.heard, member.pinged = now, False
            else:
                yield from self._die(event, member, now)

    def _submit(self, event: Submit, member: _Member) -> Iterator[Command]:
        if event.restores:
            member.lost = None
        if member.leaves is not None:
            yield Fail(event.call, _gone(event.worker))
        elif member.lost is not None and not event.stateless:
            yield Fail(event.call, member.lost)
        else:
            member.calls[event.call] = event.stateless
            member.leaves = event.call if event.leaves else None
            if member.running:
                yield Send(event.worker, member.incarnation, event.call)

    def _start(self, event: Started, member: _Member, now: float) -> Iterator[Command]:
        member.running, member.pid, member.epoch = True, event.pid, event.epoch
        member.heard, member.pinged = now, False
        for call in member.calls:
            yield Send(event.worker, member.incarnation, call)

    def _answer(self, event: Answered, member: _Member, now: float) -> Iterator[Command]:
        member.heard, member.deaths = now, 0
        if event.call in member.calls:
            del member.calls[event.call]
            if event.call == member.leaves:
                del self._members[event.worker]
            yield Release(event.call)

    def _die(self, event: Died, member: _Member, now: float) -> Iterator[Command]:
        yield Kill(event.worker, event.incarnation, event.cause)
        if member.leaves is not None and list(member.calls) == [member.leaves]:
            del self._members[event.worker]
            yield Release(member.leaves)
            return
        if event.fault is not None and member.incarnation == 0:
            yield from self._stop(event.fault)
            return
        if member.deaths >= member.restarts:
            yield from self._stop(_died(event, member))
            return
        member.deaths += 1
        unit = {event.worker: member}
        if member.unit:
            lost = _lost(event, member)
            unit = {w: m for w, m in self._members.items() if m.unit == member.unit}
            for worker, mate in unit.items():
                yield from _lose(mate, lost)
                if mate is not member:
                    yield Kill(worker, mate.incarnation, f"{event.worker} died")
        for worker, mate in unit.items():
            mate.incarnation += 1
            mate.running, mate.since, mate.pid = False, now, None
            yield Launch(worker, mate.incarnation, event.cause)

    def _stop(self, error: WorkerError) -> Iterator[Command]:
        self._stopped = error
        for member in self._members.values():
            for call in member.calls:
                yield Fail(call, error)
            member.calls.clear()
        yield Stop(error)

    def _tick(self, now: float) -> Iterator[Command]:
        # A pause of this very process (a suspended laptop, a debugger) is nobody else's silence.
        late = 0.0 if self._ticked is None else now - self._ticked - self.limits.heartbeat_s
        pause = late if late > self.limits.heartbeat_s else 0.0
        self._ticked = now
        for worker, member in list(self._members.items()):
            member.heard += pause
            member.since += pause
            if not member.running and now - member.since > self.limits.start_s:
                cause = f"it did not start within {self.limits.start_s:g} s"
            elif member.running and now - member.heard > self.limits.silence_s:
                silence = self.limits.silence_s
                cause = (
                    f"it gave no sign of life for {silence:g} s (stopped or hung) and was killed"
                )
            else:
                if member.running and not member.pinged:
                    member.pinged = True
                    yield Ping(worker, member.incarnation)
                continue
            yield from self._die(Died(worker, member.incarnation, cause), member, now)
            if self._stopped is not None:
                return


def _gone(worker: str) -> WorkerError:
    text = f"{worker} has left its group: call the group as it is now"
    return WorkerDied(text, worker=worker, cause="it was asked to leave")


def _lose(member: _Member, lost: StateLost) -> Iterator[Command]:
    member.lost = lost
    for call in [call for call, stateless in member.calls.items() if not stateless]:
        del member.calls[call]
        yield Fail(call, lost)


def _lost(event: Died, member: _Member) -> StateLost:
    process = f" (process {member.pid})" if member.pid else ""
    text = (
        f"worker {event.worker}{process} died: {event.cause}. It was started again without what it "
        "held: go back to a checkpoint and repeat what came after it"
    )
    return StateLost(text, worker=event.worker, cause=event.cause, pid=member.pid)


def _died(event: Died, member: _Member) -> WorkerError:
    process = f" (process {member.pid})" if member.pid else ""
    if member.restarts:
        times = f"{member.deaths + 1} times in a row without finishing a call"
        tried = f"; it died {times} and may be restarted {member.restarts} times"
    else:
        tried = "; its state cannot be rebuilt, so it is not restarted"
    message = f"worker {event.worker}{process} died: {event.cause}{tried}. The job was stopped"
    if event.fault is not None:
        return StartError(message, worker=event.worker, traceback=event.fault.traceback)
    return WorkerDied(message, worker=event.worker, cause=event.cause, pid=member.pid)
