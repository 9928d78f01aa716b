"""Loop: who reads the sockets of an endpoint, and when.

Leader and followers on one poller. A thread that waits for a handle leads if nobody does: it polls
and dispatches for everybody until its own handle is done, then the next waiter leads. Only while
nobody waits does a background thread lead. When a waiter has gone, the background thread lingers
for about a millisecond before it takes over, so that a thread that sends, waits, sends, waits is
never answered by way of another thread. One that comes later takes the lead at once while the
background thread rests, which finds out when it is woken; if it dispatches, it is waited for.

Nothing spins: every thread here is asleep in the poll, on a lock, or running a callback.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rlinf.comm.handle import Handle
from rlinf.comm.poller import Poller
from rlinf.comm.timers import Timer, Timers

log = logging.getLogger(__name__)

LINGER_S = 0.001
JOIN_S = 5.0
QUIET_ROUNDS = 5
NOBODY = 0


class _Gate:
    """A one-shot wake-up that may be set more than once, from any thread."""

    __slots__ = ("_lock", "_set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._set = False

    def set(self) -> None:
        if not self._set:
            self._set = True
            try:
                self._lock.release()
            except RuntimeError:  # two threads set it at once: it is open, which is what we want
                return

    def wait(self, seconds: float | None) -> None:
        self._lock.acquire(timeout=-1 if seconds is None else max(0.0, seconds))


class Loop:
    """One endpoint's progress. Callbacks run on the leading thread, one at a time.

    A callback may itself wait for a handle: the wait then polls from within (nested).

    Attributes:
        poller: Whom to tell of descriptors.
        leader: Which thread dispatches.
        apart: What to call before a thread waits here, for links that are read by others: they
            are to be polled again.
        busy: Callbacks that report what was read already, at work now. The poller would not say
            that there is more, so a wait from within runs them again before it polls.
    """

    def __init__(self, name: str) -> None:
        self.poller = Poller()
        self._timers = Timers()
        self._mutex = threading.Lock()
        self.leader = NOBODY
        self.apart: set[Callable[[], object]] = set()
        self._followers: deque[_Gate] = deque()
        self._posted: deque[Callable[[], None]] = deque()
        self.busy: list[Callable[[], None]] = []
        self._asleep = False
        self._wakes_at: float | None = None
        self._turns = 0
        self._closed = self._shut_down = False
        self._parked = self._resting = False
        self._rest = threading.Lock()
        self._rest.acquire()
        self._thread = threading.Thread(target=self._background, name=name, daemon=True)
        self._thread.start()

    # -- what others ask for -------------------------------------------------------------------

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the dispatching thread soon; from any thread, in order."""
        self._posted.append(action)
        if self._asleep:
            self.wake()

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Run `action` on the dispatching thread after that time."""
        when = time.monotonic() + seconds
        timer = self._timers.call_at(when, action)
        self._wake_before(when)
        return timer

    def expire(self, when: float, handle: Handle[Any], error: Callable[[], BaseException]) -> None:
        """Complete the handle with `error()` if it is still pending at `when`."""
        self._timers.expire_at(when, handle, error)
        handle.add_done_callback(lambda done: self._timers.forget(when, done))
        self._wake_before(when)

    def wake(self) -> None:
        """Make the leader (whoever it is or will be) look again."""
        with contextlib.suppress(OSError, ValueError):  # closed just now
            if not self._closed:
                self.poller.kick()

    def is_dispatching(self) -> bool:
        """Whether the calling thread is the one that runs callbacks just now."""
        return self.leader == threading.get_ident()

    # -- waiting -------------------------------------------------------------------------------

    def drive(self, handle: Handle[Any], deadline: float | None) -> None:
        """Make progress until the handle is done or the deadline has come."""
        me = threading.get_ident()
        for look in tuple(self.apart):
            look()
        if self.leader == me:
            for action in tuple(self.busy):
                action()
            self._lead(handle, deadline)
            return
        while not handle.done() and not _passed(deadline):
            gate: _Gate | None = None
            with self._mutex:
                if (self.leader == NOBODY or self._resting) and not self._closed:
                    if self._resting:
                        self._resting = False
                        self.poller.ring()
                    self.leader = me
                    self._turns += 1
                else:
                    gate = _Gate()
                    self._followers.append(gate)
                    if self.leader == self._thread.ident:
                        self.wake()
            if gate is not None:
                self._follow(gate, handle, deadline)
                continue
            try:
                self._lead(handle, deadline)
            finally:
                self.retire()

    def turn(self, seconds: float | None) -> None:
        """Poll once, up to so many seconds (None: for ever), and run what there is to run."""
        heap = self._timers.heap
        try:
            self.poller.poll(self._fall_asleep(seconds))
        except (OSError, ValueError):
            if not self._closed:
                raise
        finally:
            self._asleep = False
        while self._posted:
            self._run(self._posted.popleft())
        if heap and heap[0][0] <= time.monotonic():
            self._timers.run(time.monotonic())

    def _fall_asleep(self, seconds: float | None) -> float | None:
        """From here on, whoever adds something wakes this thread; how long it may sleep."""
        heap = self._timers.heap
        self._wakes_at = None
        self._asleep = True
        if self._posted or self._closed:
            return 0.0
        if heap:
            now = time.monotonic()
            left = heap[0][0] - now
            if seconds is None or left < seconds:
                seconds = left if left > 0.0 else 0.0
            self._wakes_at = now + seconds
        return seconds

    def retire(self) -> None:
        """Give up the lead."""
        with self._mutex:
            self.leader = NOBODY
            self._turns += 1
            if self._followers or self._parked:
                self._promote()
        if self._closed:
            self._shut()

    def _follow(self, gate: _Gate, handle: Handle[Any], deadline: float | None) -> None:
        if handle.add_waker(gate.set):
            gate.wait(None if deadline is None else deadline - time.monotonic())
        with self._mutex:
            if gate in self._followers:
                self._followers.remove(gate)
            elif self.leader == NOBODY and (handle.done() or _passed(deadline)):
                self._promote()  # chosen to lead, but with nothing left to wait for

    def _lead(self, handle: Handle[Any], deadline: float | None) -> None:
        if not handle.add_waker(self._wake_if_elsewhere):
            return
        while not handle.done() and not self._closed:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            self.turn(left)

    def _wake_if_elsewhere(self) -> None:
        if threading.get_ident() != self.leader:
            self.wake()

    def _promote(self) -> None:
        """Give the lead to a follower, else see that the background thread is about."""
        if self._followers:
            self._followers.popleft().set()
        elif self._parked:
            self._parked = False
            self._rest.release()

    # -- the background thread -----------------------------------------------------------------

    def _background(self) -> None:
        me = threading.get_ident()
        quiet, seen = 0, -1
        while not self._closed:
            with self._mutex:
                calm = self._turns == seen
                seen = self._turns
                leading = calm and self.leader == NOBODY and not self._followers
                quiet = quiet + 1 if calm and not leading else 0
                if leading:
                    self.leader = me
                elif quiet > QUIET_ROUNDS and self.leader != NOBODY:
                    self._parked = True
            if leading:
                try:
                    while self._rested():
                        self.turn(0.0 if self.poller.rests else None)
                finally:
                    if self.leader == me:
                        self.retire()
                seen, quiet = -1, 0
            if self._parked:
                self._rest.acquire()
                seen, quiet = -1, 0
            else:
                self._rest.acquire(timeout=LINGER_S)

    def _rested(self) -> bool:
        """Sleep until there is something to do; False: it is not for this thread to do it.

        Meanwhile the lead may be taken from it.
        """
        with self._mutex:
            if self._closed or self._followers:
                return False
            if not self.poller.rests:
                return True
            seconds = self._fall_asleep(None)
            self._resting = True
        self.poller.rest(seconds)
        with self._mutex:
            if self._closed:  # another thread may have given the descriptors back already
                self._resting = False
                return False
            self.poller.hush()
            if not self._resting:
                return False
            self._resting = self._asleep = False
        return True

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("a callback on the dispatching thread raised")

    def _wake_before(self, when: float) -> None:
        if self._asleep and (self._wakes_at is None or when < self._wakes_at):
            self.wake()

    # -- the end -------------------------------------------------------------------------------

    def abandon(self) -> None:
        """In a forked child: the thread is not there, and the descriptors are the parent's."""
        self._closed = self._shut_down = True
        self.poller.close()

    def close(self) -> None:
        """Stop the background thread and give the descriptors back; from any thread.

        A thread that leads meanwhile finds out, and is the one that gives them back.
        """
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self.poller.kick()
            if self._parked:
                self._parked = False
                self._rest.release()
        if threading.get_ident() != self._thread.ident:
            self._thread.join(JOIN_S)
        self._shut()

    def _shut(self) -> None:
        with self._mutex:
            if self.leader == NOBODY and not self._shut_down:
                self._shut_down = True
                self.poller.close()


def _passed(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline
