"""The loop around a stage, and the only place where a placement is acted on.

For each chunk: lease it from the input channel; where the devices are shared with another group,
hold their lock (in the order of iterations, then of the flow) around onload, work and offload;
call the method; commit the outputs and acknowledge the chunk in one step on the channel server.
So a temporal plan makes groups take turns, and a spatial one lets them work side by side, with no
difference in the program. A worker killed at any point loses nothing and repeats nothing.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rlinf.channel import Channel, DeviceLock, Full, Lease, Standstill
from rlinf.channel.lease import Commit
from rlinf.workers.base import WorkerBase
from rlinf.workers.inlet import Inlet, RingInlet
from rlinf.workers.launch.threads import end_threads
from rlinf.workers.messages import Call, Flow
from rlinf.workers.records import ChunkRecord, StageReport
from rlinf.workers.stages import Again, Stage, stages

__all__ = ["StageRunner"]

Output = tuple[Any, float]
Emitted = tuple[int, Any, float]
"""An output of a streaming stage: index of the item, output, weight."""
ROOM_S = 10.0
"""The same for a wait for room in the output channel."""
EAGER_S = 0.05
"""Where no plan says how large chunks are, they may grow to take so long."""
PATIENCE_S = 30.0
"""How much later than that the server may answer before it counts as silent."""


class StageRunner:
    """Carries out the stage calls of one worker, on its main thread.

    Args:
        worker: Constructed, with its context.
    """

    def __init__(self, worker: WorkerBase) -> None:
        place = worker.context.place
        self._worker, self._chunk, self._eager = worker, place.chunk, place.eager
        self._stages = stages(type(worker))
        self._position = place.placement.position if place.placement else 0
        self._lock = DeviceLock(worker.endpoint, place.devices) if place.shared else None
        self._sizes: dict[str, int] = {}
        """How large chunks have become, by stage, where no plan says it."""

    def run(self, call: Call, check: Callable[[], None]) -> StageReport:
        """Loop until the input is closed and empty.

        `check` is called often and raises to give up. Whatever the method raises goes through,
        after its chunk was given back.
        """
        work = self._opened(call, check)
        while True:
            work.waiting_since = time.monotonic()
            if (chunk := work.inlet.next()) is None:
                break
            source, lease, ending = chunk
            with ending:
                record = self._do(work, source, lease)
            tokens = sum(map(self._worker.count_tokens, record.outputs or record.items))
            work.records.append(record.close(str(self._worker.id), call.method, tokens))
            if self._eager:
                self._grow(work)
        if work.mark.finish and not work.finished:
            record = _Open(work, (), self._worker)
            with self._hold(work, record):
                record.start()
                self._finish(work)
                record.stop()
            work.records.append(record.close(str(self._worker.id), work.mark.finish, 0))
        closed = self._worker.world_size == 1 and work.target is not None
        if closed and work.target is not None:
            work.target.close()  # nobody else writes there: those downstream need not wait for word
        return StageReport(
            worker=str(self._worker.id),
            stage=call.method,
            iteration=work.flow.iteration,
            records=tuple(work.records),
            values=tuple(work.values),
            result=work.result,
            closed=closed,
        )

    def _grow(self, work: "_Work") -> None:
        """Let the next chunk of a stage without a plan be as large as its pace allows."""
        last = work.records[-1]
        if self._chunk is not None and last.items_in:
            size = max(self._chunk, int(EAGER_S * last.items_in / max(last.seconds, 1e-6)))
            work.inlet.size = self._sizes[work.call.method] = size

    def _opened(self, call: Call, check: Callable[[], None]) -> "_Work":
        flow, mark, endpoint = call.flow, self._stages[call.method], self._worker.endpoint
        assert flow is not None
        refs = [ref for ref in (flow.input, flow.output) if ref is not None]
        source, *targets = Channel.connect_all(refs, endpoint)
        target = targets[0] if targets else None
        # What comes round in a ring comes together; there is no end of it to wait for.
        full = not self._eager and (flow.heads or not flow.ring)
        size = self._sizes.get(call.method, self._chunk)
        if not flow.heads:
            alone = self._worker.world_size == 1 and not self._worker.context.incarnation
            inlet = Inlet(source, size, full, check, alone)
            return _Work(call, flow, mark, check, inlet, target)
        ring = tuple(channel.open(endpoint) for channel in flow.ring)
        head = RingInlet(source, size, full, check, ring=ring)
        return _Work(call, flow, mark, check, head, target, ring[0])

    def _do(self, work: "_Work", source: Channel, lease: Lease) -> "_Open":
        items = list(lease)
        record = _Open(work, items, self._worker, source.ref.name)
        with self._hold(work, record):
            record.start()
            method = getattr(self._worker, work.call.method)
            answer = method(items, *work.call.args, **(work.call.kwargs or {}))
            if isinstance(answer, Iterator):
                self._stream(work, lease, answer, record)
            else:
                outputs = _outputs(answer, len(items), work) if work.target is not None else []
            # Ranks finish together: the lease of one must not keep another from coming.
            alone = self._chunk is None and self._worker.world_size == 1 and not work.flow.ring
            if work.mark.finish and alone:
                self._finish(work)
            record.stop()
        if not isinstance(answer, Iterator):
            if work.forth is not None:
                self._send_round(work, source, lease, outputs, record)
            elif work.target is not None:
                _commit(work, work.target, lease, lease.held, outputs)
                record.emit([output for output, _ in outputs])
            else:
                work.values.append(answer)
        return record

    def _send_round(
        self,
        work: "_Work",
        source: Channel,
        lease: Lease,
        outputs: list[Output],
        record: "_Open",
    ) -> None:
        """Commit what a ring's head made: first what goes round once more, then what leaves."""
        assert work.forth is not None and work.target is not None
        assert isinstance(work.inlet, RingInlet)
        again = [k for k, (output, _) in enumerate(outputs) if isinstance(output, Again)]
        if again:
            going = [(outputs[k][0].value, outputs[k][1]) for k in again]
            _commit(work, work.forth, lease, again, going)
            record.emit([output for output, _ in going], work.forth.ref.name)
        work.inlet.passed(source, len(again), len(outputs))
        if lease.held:
            leaving = [outputs[k] for k in lease.held]
            _commit(work, work.target, lease, lease.held, leaving)
            record.emit([output for output, _ in leaving])

    def _stream(self, work: "_Work", lease: Lease, answer: Iterator[Any], record: "_Open") -> None:
        """Pass on each output as it comes, and settle its item, without waiting for the server."""
        if work.forth is not None:
            raise TypeError("yields, but the head of a ring returns a list of outputs")
        left = set(range(len(record.items)))
        sending = _Sending(work, lease)
        for emitted in answer:
            work.check()
            together = list(map(_emitted, emitted if isinstance(emitted, list) else [emitted]))
            for index, _, _ in together:
                if index not in left:
                    text = f"yielded item {index}, which is not one of {sorted(left)}"
                    raise ValueError(text)
                left.remove(index)
            if work.target is not None and together:
                sending.add(together)
                record.emit([output for _, output, _ in together])
        if left:
            raise ValueError(f"ended without an output for the items {sorted(left)} of its chunk")
        sending.finish()

    def _finish(self, work: "_Work") -> None:
        work.finished = True
        work.result = getattr(self._worker, work.mark.finish)()

    @contextmanager
    def _hold(self, work: "_Work", record: "_Open") -> Iterator[None]:
        """Have the devices to oneself, with the worker's state on them."""
        if self._lock is None:
            yield
            return
        with self._lock.hold((work.flow.iteration, self._position), timeout=None):
            work.check()
            record.granted = time.monotonic()
            self._worker.onload()
            try:
                yield
            finally:
                before = time.monotonic()
                self._worker.offload()
                end_threads()
                record.offload_s = time.monotonic() - before


@dataclass(slots=True)
class _Work:
    """One stage call in progress."""

    call: Call
    flow: Flow
    mark: Stage
    check: Callable[[], None]
    inlet: Inlet
    target: Channel | None
    forth: Channel | None = None
    """Where a ring begins, for its head."""
    waiting_since: float = 0.0
    finished: bool = False
    result: Any = None
    values: list[Any] = field(default_factory=list)
    records: list[ChunkRecord] = field(default_factory=list)


class _Open:
    """A record that is being made."""

    def __init__(
        self, work: _Work, items: Sequence[Any], worker: WorkerBase, source: str = ""
    ) -> None:
        self.items, self._source = items, source or work.flow.input.name
        self._target = work.flow.output.name if work.flow.output is not None else ""
        self._worker = worker
        self.outputs: list[Any] = []
        self.offload_s = 0.0
        self.granted = self._leased = time.monotonic()
        self._work = work
        self._emitted: list[float] = []
        self._started = self._began = self._worked_s = 0.0
        self._idle_s = self._idle_before_s = 0.0
        self._cpu_s = self._cpu_before_s = 0.0
        self._resident_bytes = 0

    def start(self) -> None:
        self._started, self._began = time.time(), time.monotonic()
        self._idle_before_s, self._cpu_before_s = self._worker.idle_s(), self._worker.cpu_s()

    def stop(self) -> None:
        self._worked_s = time.monotonic() - self._began
        self._idle_s = self._worker.idle_s() - self._idle_before_s
        # Of a process that was replaced meanwhile nothing is known any more.
        self._cpu_s = max(0.0, self._worker.cpu_s() - self._cpu_before_s)
        self._resident_bytes = self._worker.resident_bytes()

    def emit(self, outputs: Sequence[Any], target: str = "") -> None:
        self._target = target or self._target
        self.outputs.extend(outputs)
        self._emitted += [self._now()] * len(outputs)

    def close(self, worker: str, stage: str, tokens: int) -> ChunkRecord:
        work = self._work
        return ChunkRecord(
            worker=worker,
            stage=stage,
            iteration=work.flow.iteration,
            input=self._source,
            output=self._target,
            start=self._started,
            end=self._now(),
            seconds=self._worked_s,
            waited_s=self._leased - work.waiting_since,
            locked_s=self.granted - self._leased,
            onload_s=self._began - self.granted,
            offload_s=self.offload_s,
            resident_bytes=self._resident_bytes,
            items_in=len(self.items),
            items_out=len(self.outputs),
            tokens=tokens,
            emitted=tuple(self._emitted),
            idle_s=self._idle_s,
            cpu_s=self._cpu_s,
            devices=len(self._worker.context.devices),
        )

    def _now(self) -> float:
        return self._started + time.monotonic() - self._began


class _Sending:
    """Outputs of a streaming stage on their way: while one commit travels, the next gathers."""

    def __init__(self, work: _Work, lease: Lease) -> None:
        self._work, self._lease = work, lease
        self._gathered: list[Emitted] = []
        self._travelling: list[Emitted] = []
        self._commit: Commit | None = None

    def add(self, together: Sequence[Emitted]) -> None:
        """Pass outputs on, now or with the next commit. Raises what an earlier commit met."""
        self._gathered += together
        if self._commit is None or self._commit.done():
            self._arrive()
            self._depart()

    def finish(self) -> None:
        """Return when the server has everything."""
        while self._gathered or self._commit is not None:
            if self._commit is not None:
                self._commit.wait(ROOM_S + PATIENCE_S)
            self._arrive()
            self._work.check()
            self._depart()

    def _depart(self) -> None:
        if not self._gathered:
            return
        assert self._work.target is not None
        self._travelling, self._gathered = self._gathered, []
        self._commit = self._lease.commit_later(
            [index for index, _, _ in self._travelling],
            [(output, weight) for _, output, weight in self._travelling],
            self._work.target,
            timeout=ROOM_S,
        )

    def _arrive(self) -> None:
        if self._commit is None:
            return
        try:
            self._commit.conclude()
        except Standstill:
            raise
        except Full:  # nothing was put: those downstream need longer
            self._gathered = self._travelling + self._gathered
        self._commit = None


def _commit(
    work: "_Work",
    target: Channel,
    lease: Lease,
    indexes: Sequence[int],
    outputs: Sequence[Output],
) -> None:
    """Pass outputs on; wait for as long as those downstream take to make room.

    Raises:
        Standstill: They never will.
    """
    while True:
        try:
            lease.commit_items(indexes, outputs, target, timeout=ROOM_S)
        except Standstill:
            raise
        except Full:
            work.check()
        else:
            return


def _outputs(answer: Any, items: int, work: "_Work") -> list[Output]:
    """What a chunk function returned, as pairs of output and weight."""
    if isinstance(answer, tuple) and len(answer) == 2 and work.forth is None:
        outputs, weights = answer
        return list(zip(outputs, weights, strict=True))
    if not isinstance(answer, list):
        raise TypeError(f"returned {type(answer).__name__}: a stage returns a list of outputs")
    if len(answer) != items:
        raise ValueError(
            f"returned {len(answer)} outputs for {items} items; return (outputs, weights) where "
            "their number differs"
        )
    if work.forth is None and any(isinstance(output, Again) for output in answer):
        raise TypeError("returned Again, but it is not called as the head of a ring")
    return [(output, 1.0) for output in answer]


def _emitted(emitted: Any) -> Emitted:
    if not isinstance(emitted, tuple) or len(emitted) not in (2, 3):
        raise TypeError(
            f"yielded {type(emitted).__name__}: a stage yields (index, output[, weight])"
        )
    index, output, *weight = emitted
    return index, output, weight[0] if weight else 1.0
