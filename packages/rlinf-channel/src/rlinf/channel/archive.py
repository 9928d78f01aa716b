"""What a server does so that its memory outlives it, for channels and the lock together."""

import threading
from collections.abc import Callable, Sequence

from rlinf.channel.errors import SpoolFull
from rlinf.channel.journal import Finished, Record, ServerState
from rlinf.channel.run import Run
from rlinf.channel.spool import Spool

ITEM_BYTES, RUN_BYTES = 64, 256
"""More than an item's figures, head and padding take, and than a run's row does, but for keys."""


class Archive:
    """Keeps the records of each step before anybody is told of it. To be called under `lock`.

    Args:
        spool: None: nothing outlives the server, and nothing is recorded.

    Attributes:
        lock: Of the whole server: what is kept is in the order of the steps.
        found: What an earlier server left.
        savers: Each adds its part of the present state, for tidying up.
    """

    def __init__(self, spool: Spool | None) -> None:
        self.lock = threading.Lock()
        self.savers: list[Callable[[ServerState], object]] = []
        self.found = ServerState() if spool is None else spool.state
        self._spool = spool
        self._finished = 0
        """Settlements recorded since the log was tidied up last."""

    @property
    def durable(self) -> bool:
        """Whether there is anything to keep records in."""
        return self._spool is not None

    @property
    def survives(self) -> str:
        """What an acknowledged item survives, besides its producer: see `Channel.durability`."""
        return "memory" if self._spool is None else self._spool.config.sync

    def check(self) -> None:
        """Raises `SpoolFailed` once the spool has failed."""
        if self._spool is not None:
            self._spool.check()

    def reserve(self, runs: Sequence[Run]) -> None:
        """See that a put of these items can be kept; `SpoolFull` if not."""
        if self._spool is None:
            return
        nbytes = sum([run.nbytes + ITEM_BYTES * run.count + RUN_BYTES for run in runs])
        try:
            self._spool.reserve(nbytes)
        except SpoolFull:
            if not self._finished:  # the log holds nothing that could be left out
                raise
            self._tidy(self._spool)
            self._spool.reserve(nbytes)

    def keep(self, records: Sequence[Record]) -> None:
        """Write the records of one step. `SpoolFailed`: they are not kept, and nothing will be."""
        if self._spool is None or not records:
            return
        self._spool.write(records)
        self._finished += sum(isinstance(record, Finished) for record in records)
        if self._spool.untidy:
            self._tidy(self._spool)

    def _tidy(self, spool: Spool) -> None:
        state = ServerState()
        for save in self.savers:
            save(state)
        spool.tidy(state)
        self._finished = 0

    def close(self) -> None:
        """Give the folder free."""
        with self.lock:
            if self._spool is not None:
                self._spool.close()
