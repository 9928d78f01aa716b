"""Membership: an endpoint's lease in the registry, from registering to leaving."""

import logging
from dataclasses import replace

from rlinf.comm.errors import CommError, EndpointClosed, StaleEpoch
from rlinf.comm.handle import Handle
from rlinf.comm.progress import Loop
from rlinf.comm.registry import Registry, WorkerRecord
from rlinf.comm.timers import Timer

log = logging.getLogger(__name__)


class Membership:
    """Registers once, then renews from the dispatching thread."""

    def __init__(self, registry: Registry, loop: Loop, heartbeat_s: float) -> None:
        self._registry = registry
        self._loop = loop
        self._heartbeat_s = heartbeat_s
        self._timer: Timer | None = None
        self._record: WorkerRecord | None = None
        self._failing = False

    def join(self, record: WorkerRecord, timeout_s: float) -> WorkerRecord:
        """Register; the record returned has its final epoch. The heartbeat begins."""
        handle = self._registry.register(record)
        try:
            self._record = handle.result(timeout_s)
        except StaleEpoch as error:
            # The clock of this host is behind that of an earlier incarnation's.
            again = replace(record, epoch=(error.epoch or 0) + 1)
            self._record = self._registry.register(again).result(timeout_s)
        self._schedule()
        return self._record

    def leave(self, timeout_s: float) -> None:
        """Stop the heartbeat and unregister; a registry that is away is not waited for."""
        if self._timer is not None:
            self._timer.cancel()
        record, self._record = self._record, None
        if record is None:
            return
        try:
            self._registry.unregister(record.id, record.epoch).result(timeout_s)
        except CommError as error:
            log.info("%s: could not unregister (%s); its lease will run out", record.id, error)

    def _schedule(self) -> None:
        self._timer = self._loop.call_later(self._heartbeat_s, self._beat)

    def _beat(self) -> None:
        if self._record is None:
            return
        self._registry.renew(self._record).add_done_callback(self._beaten)
        self._schedule()

    def _beaten(self, handle: Handle[None]) -> None:
        error = handle.exception()
        if isinstance(error, EndpointClosed):
            return
        if error is not None and not self._failing:
            level = logging.ERROR if isinstance(error, StaleEpoch) else logging.WARNING
            log.log(level, "heartbeat: %s", error)
        self._failing = error is not None
