"""Recovery: the steps of a program, with checkpoints, and repeated from one where state was lost.

    recovery = Recovery(cluster, [trainer], checkpoints, begin=lambda: trainer.warm_up().result())
    for attempt in recovery.steps(60):
        with attempt as step:
            ...                            # one iteration of the flow

When a worker that holds state dies, its group is started again and the step fails with `StateLost`,
which ends in the `with`: all groups that hold state go back to the newest complete checkpoint, or
to the beginning where there is none yet, and the loop goes on with the step after it. The other
workers keep what they have. Their samples of the steps to be repeated are made again: what the
weights have learnt from is each step's samples once.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rlinf.channel import ChannelError
from rlinf.comm import CommError
from rlinf.comm.errors import Timeout
from rlinf.workers.checkpoint import Checkpoint, Checkpoints
from rlinf.workers.cluster import Cluster
from rlinf.workers.errors import StateLost, WorkerDied, WorkerError, is_consequence
from rlinf.workers.group import WorkerGroup, wait_all
from rlinf.workers.position import Position

__all__ = ["Attempt", "Journal", "Recovery"]

log = logging.getLogger(__name__)

BURIED_S = 60.0
"""This long after it was killed, at most, a worker is known to be dead."""


class Journal(Protocol):
    """Who is told how the steps go; `rlinf.workers.run.Run` is one."""

    @property
    def stopping(self) -> bool:
        """The step under way is to be the last one."""

    def begin(self, steps: int) -> None:
        """There will be so many steps."""

    def begin_step(self) -> None:
        """A step begins."""

    def go_back(self, step: int) -> None:
        """What came after `step` did not happen."""


class _Silent:
    """A journal that nobody reads."""

    stopping = False

    def begin(self, steps: int) -> None:
        """See `Journal`."""

    def begin_step(self) -> None:
        """See `Journal`."""

    def go_back(self, step: int) -> None:
        """See `Journal`."""


class Attempt(AbstractContextManager[int]):
    """One attempt at a step, whose number the `with` gives.

    Attributes:
        failed: It ended with a loss of state; what there is to go back to was gone back to.
    """

    def __init__(self, inner: AbstractContextManager[int]) -> None:
        self._inner = inner
        self.failed = False

    def __enter__(self) -> int:
        return self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> bool:
        self.failed = bool(self._inner.__exit__(kind, error, tb))
        return self.failed


class Recovery:
    """Drives the steps of one run.

    Args:
        cluster: Its `restarts` is also how often a step may fail before the job stops.
        groups: Those that hold state: their workers have `save(folder) -> [SavedFile]` and
            `restore(folder or None)`, None: as constructed.
        checkpoints: Where they go, when, and what the run goes on from.
        begin: What is to be done before the first step, on groups as they were constructed.
        journal: See `Journal`.
        position: Of the program in its data; saved and brought back with the weights.
    """

    def __init__(
        self,
        cluster: Cluster,
        groups: Sequence[WorkerGroup],
        checkpoints: Checkpoints,
        begin: Callable[[], object] = lambda: None,
        journal: Journal | None = None,
        position: Position | None = None,
    ) -> None:
        self._cluster, self._groups, self._begin = cluster, groups, begin
        self._checkpoints, self._position = checkpoints, position or Position()
        self._journal: Journal = journal or _Silent()
        self._done = self._saved = self._furthest = self._failures = 0
        self._told: StateLost | None = None
        """The loss that was gone back for last, until a step succeeds again."""

    def steps(self, count: int) -> Iterator[Attempt]:
        """An attempt at a time, until `count` steps are done or the journal says to stop.

        Raises:
            WorkerDied: One step failed more often than workers may be restarted.
            CheckpointFailed: A checkpoint could not be written.
        """
        self._journal.begin(count)
        with self._guarded():
            self._bring_back(fresh=True)
        while True:
            while self._done < count and not self._journal.stopping:
                yield Attempt(self._attempt())
            if self._saved == self._done:
                return
            with self._guarded():
                self._save(self._done)

    @contextmanager
    def _attempt(self) -> Iterator[int]:
        self._journal.begin_step()
        with self._guarded():
            step = self._done + 1
            yield step
            every = self._checkpoints.config.every
            if every and step % every == 0:
                self._save(step)
            self._done = step
            self._told = None
            if step > self._furthest:
                self._furthest, self._failures = step, 0

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Go back where state is lost inside; other errors pass."""
        try:
            yield
        except (WorkerError, ChannelError, CommError) as error:
            lost: StateLost | None = self._cause(error)
            if lost is None:
                raise
            while lost is not None:
                lost = self._go_back(lost)

    def _cause(self, error: Exception) -> StateLost | None:
        """The loss of state that this error is, or comes from; None: something else."""
        if isinstance(error, StateLost):
            return error
        if not is_consequence(error):
            return None
        known_s = self._cluster.config.silence_s + BURIED_S
        for group in self._groups:
            try:
                group.resident_bytes().result(known_s)
            except StateLost as lost:
                return lost
            except (WorkerError, Timeout):
                continue
        # Others may hear of it late: by calling the one that is gone when the next one runs.
        return self._told

    def _go_back(self, lost: StateLost) -> StateLost | None:
        """Everybody back to the newest checkpoint; the next loss, should one come meanwhile."""
        self._failures += 1
        self._told = lost
        restarts, step = self._cluster.config.restarts, self._done + 1
        if self._failures > restarts:
            raise WorkerDied(
                f"worker {lost.worker} died: {lost.cause}; step {step} has failed "
                f"{self._failures} times and may be repeated {restarts} times. The job was stopped",
                worker=lost.worker,
                cause=lost.cause,
                pid=lost.pid,
            ) from lost
        try:
            self._bring_back()
        except StateLost as again:
            return again
        text = f"{lost.worker} died: {lost.cause}. Its group went back to step {self._done}"
        log.warning(text)
        self._cluster.note("recovery", text, lost.worker or "")
        return None

    def _bring_back(self, fresh: bool = False) -> None:
        source = self._checkpoints.newest()
        if source is not None:
            self._restore(source)
        else:
            if not fresh:
                wait_all([group.restore(None) for group in self._groups])
            self._position.load(None)
            self._begin()
        self._done = self._saved = source.step if source else 0
        self._checkpoints.set_aside_after(self._done)
        self._journal.go_back(self._done)

    def _restore(self, source: Checkpoint) -> None:
        wait_all([group.restore(str(source.folder)) for group in self._groups])
        self._position.load(source.state.get("position"))

    def _save(self, step: int) -> None:
        if self._groups:
            with self._checkpoints.draft(step) as draft:
                folder = str(Path(draft.folder).absolute())
                saved = wait_all([group.save(folder) for group in self._groups])
                files = [file for ranks in saved for rank in ranks for file in rank]
                state: dict[str, Any] = dict(self._checkpoints.about())
                draft.commit(files, {**state, "position": self._position.state()})
        self._saved = step
