"""Iterations: their channels, from creation to deletion, and the stage calls between them.

A channel is closed when every rank of the stage that writes to it is done, and deleted when those
of the stage that reads from it are done as well: a worker that is killed when all it wrote is read
already, but before it could say so, is called again and finds its channels. A stage call that fails
takes its iteration with it: the calls under way are given up, and its channels emptied.
"""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rlinf.channel import Channel, ChannelBusy, ChannelClosed, ChannelError, ChannelRef
from rlinf.channel import Timeout as ChannelTimeout
from rlinf.comm import CommError, Endpoint, Handle
from rlinf.workers.errors import ClusterClosed
from rlinf.workers.messages import Flow

__all__ = ["Iterations"]

log = logging.getLogger(__name__)


class Iterations:
    """See the module. Thread-safe; what may block is done on a thread of its own.

    Args:
        endpoint: Of the controller.
        abort: Gives up the call of this number, because of that.
    """

    def __init__(self, endpoint: Endpoint, abort: Callable[[int, str], object]) -> None:
        self._endpoint, self._abort = endpoint, abort
        self._tries: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._channels: dict[str, tuple[int, Channel]] = {}
        self._rings: dict[str, tuple[ChannelRef, ...]] = {}
        self._failed: dict[str, Channel] = {}
        self._running: dict[int, set[int]] = {}
        self._writers: Counter[str] = Counter()
        self._read: set[str] = set()
        self._settlers = ThreadPoolExecutor(1, thread_name_prefix="rlinf-settle")

    def close(self) -> None:
        """Nothing more is settled."""
        self._settlers.shutdown(cancel_futures=True)

    def fresh(self, name: str) -> str:
        """The name itself; of one that was given before, another."""
        with self._lock:
            self._tries[name] += 1
            return name if self._tries[name] == 1 else f"{name}.again{self._tries[name] - 1}"

    def add(self, step: int, channels: Iterable[Channel]) -> None:
        """These belong to an iteration."""
        with self._lock:
            self._channels.update((channel.ref.name, (step, channel)) for channel in channels)

    def add_ring(self, refs: tuple[ChannelRef, ...]) -> None:
        """These, which were added, lead round."""
        with self._lock:
            self._rings.update((ref.name, refs) for ref in refs)

    def of(self, channel: str, default: int) -> int:
        """The iteration that a channel belongs to."""
        with self._lock:
            found = self._channels.get(channel)
        return default if found is None else found[0]

    def ring_of(self, channel: str) -> tuple[ChannelRef, ...]:
        """The ring that a channel belongs to; empty: none."""
        with self._lock:
            return self._rings.get(channel, ())

    def begins(self, flow: Flow, numbers: Sequence[int]) -> None:
        """Note that these calls belong to an iteration, which fails as a whole."""
        with self._lock:
            self._running.setdefault(flow.iteration, set()).update(numbers)
            if flow.output is not None:
                self._writers[flow.output.name] += 1

    def ended(
        self,
        flow: Flow,
        numbers: Sequence[int],
        error: BaseException | None = None,
        *,
        closed: bool = False,
    ) -> Handle[None] | None:
        """After a stage call: close its output and forget its input, or give up its iteration.

        `closed`: its only worker has closed the output already.
        """
        step = flow.iteration
        with self._lock:
            running = self._running.pop(step, set()).difference(numbers)
            if running and error is None:
                self._running[step] = running
            waits = self._no_longer_writes(flow)
        if error is None:
            if waits is not None:
                self._submit(self._forget, waits)
            written = [] if closed or flow.output is None else [flow.output]
            written += flow.ring[:1] if flow.heads else ()
            if written:
                return self._background(flow, written)
            self._forget_read(flow)
            return None
        self._give_up(step, {*numbers, *running}, str(error))
        return None

    def _no_longer_writes(self, flow: Flow) -> str | None:
        """The name of the output, if it is read already and nobody writes to it any more."""
        if flow.output is None:
            return None
        name = flow.output.name
        self._writers[name] -= 1
        if self._writers[name]:
            return None
        del self._writers[name]
        if name not in self._read:
            return None
        self._read.remove(name)
        return name

    def give_up(self, step: int) -> None:
        """End an iteration whose outcome nobody wants any more."""
        with self._lock:
            running = self._running.pop(step, set())
        self._give_up(step, running, f"iteration {step} was given up")

    def discard(self) -> None:
        """Have the channels of iterations that failed emptied and forgotten.

        What a worker still holds it gives back once it has noticed; the next call gets that.
        """
        self._submit(self._discard)

    def _give_up(self, step: int, calls: Iterable[int], because: str) -> None:
        with self._lock:
            self._failed |= {n: c for n, (at, c) in self._channels.items() if at == step}
        for number in calls:
            self._abort(number, because)

    def _settle(self, flow: Flow, written: Sequence[ChannelRef]) -> None:
        """Close what was written to: those downstream come to their end. Forget what was read."""
        for ref in written:
            with self._lock:
                _, channel = self._channels.get(ref.name, (0, None))
            (channel or ref.open(self._endpoint)).close()
        self._forget_read(flow)

    def _forget_read(self, flow: Flow) -> None:
        self._submit(self._forget, flow.input.name)
        if flow.output is not None and flow.output in flow.ring[-1:]:
            self._submit(self._forget, flow.output.name)  # its reader, the head, was done before

    def _forget(self, name: str) -> None:
        with self._lock:
            if self._writers[name]:
                self._read.add(name)
                return
            step, channel = self._channels.pop(name, (0, None))
        if channel is None:
            return
        try:
            channel.delete()
        except ChannelBusy:  # another group reads from it too, and is not done
            with self._lock:
                self._channels[name] = (step, channel)
            return
        except (ChannelError, CommError) as error:
            log.debug("channel %s was not deleted: %s", name, error)
        with self._lock:
            self._rings.pop(name, None)

    def _discard(self) -> None:
        with self._lock:
            failed = dict(self._failed)
        for name, channel in failed.items():
            try:
                channel.close()
                with contextlib.suppress(ChannelClosed):
                    while True:
                        channel.get(timeout=0)
                channel.delete()
            except (ChannelTimeout, ChannelBusy):
                continue
            except (ChannelError, CommError) as error:
                log.debug("channel %s was not deleted: %s", name, error)
            with self._lock:
                self._failed.pop(name)
                self._channels.pop(name, None)
                self._rings.pop(name, None)

    def _submit(self, function: Callable[..., None], *args: object) -> bool:
        """Have it run away from the dispatching thread; False once all is being closed."""
        try:
            self._settlers.submit(function, *args)
        except RuntimeError:
            return False
        return True

    def _background(self, flow: Flow, written: Sequence[ChannelRef]) -> Handle[None]:
        """Settle away from the dispatching thread that asks for it."""
        done: Handle[None] = Handle(f"settling the channels of {flow.input.name}", timeout_s=None)

        def run() -> None:
            try:
                self._settle(flow, written)
            except Exception as error:  # noqa: BLE001 - a thread's edge; the handle carries it
                done.set_error(error)
            else:
                done.set_result(None)

        if not self._submit(run):
            done.set_error(ClusterClosed("the cluster was closed before a stage was settled"))
        return done
