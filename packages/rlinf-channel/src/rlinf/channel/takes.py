"""Requests of one consumer, and the items that are its: what an inbox stands on.

A take that nobody waits for any more gives back what it brings. One whose server dies is asked
again of the next.
"""

import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from rlinf.channel.batching import Crate, shelve
from rlinf.channel.errors import ChannelError, LeaseLost, Timeout
from rlinf.channel.journal import REMEMBERED_RUNS
from rlinf.channel.link import GRACE_S, Link, ServerAway
from rlinf.channel.local import Local
from rlinf.channel.messages import Outcome
from rlinf.channel.run import Run
from rlinf.channel.session import Session
from rlinf.channel.spans import Ranges, Spans, orders_of
from rlinf.channel.wish import Ask, Wish
from rlinf.comm.errors import CommError
from rlinf.comm.errors import Timeout as CommTimeout


class Takes:
    """The half of an `Inbox` that asks, waits and settles. Thread-safe."""

    def __init__(self, link: Link, session: Session) -> None:
        self.link = self._link = link
        self.session = self._session = session
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._local = Local()
        """Brought along, and not begun."""
        self._begun = Spans()
        """Handed to the user by get; acknowledged by the next get, or by `acknowledge`."""
        self._leases = Spans()
        """Held, and neither brought along nor begun: under a lease, or just arriving."""
        self._asked = Spans()
        """Numbers of the takes whose answers were not read yet."""
        self._ended = Spans()
        """Handed out by get under a server that has died, and not known to be acknowledged."""
        self._done = Spans()
        """Acknowledged by the user; the server hears of it with the next request."""
        self._confirmed_at = time.monotonic()
        self._thread = 0
        """Who takes and settles, as long as it is one; see `_alone`."""
        self._failed: ChannelError | None = None
        self._once = False
        """`_failed` is told once, and then it goes on."""

    def send(self, wish: Wish, timeout_s: float | None) -> Ask:
        """A take on its way."""
        number = next(self._numbers)
        with self._lock:
            done = self._take_done()
            self._asked.add(number, number)
            holds = len(self._leases) + len(self._begun) + len(self._local)
        self._session.hold()
        reply = self._link.call("take", (number, done), (*wish, holds), timeout_s)
        sent = Ask(number, reply, done)
        reply.add_done_callback(lambda _: self._arrived(sent))
        return sent

    def withdraw(self, ask: Ask) -> bool:
        """Nobody waits any more: an item that comes later goes back. False: it has come."""
        with self._lock:
            if ask.reply.done():
                return False
            ask.abandoned = True
        self._link.call("cancel", ask.number)
        return True

    def read(self, ask: Ask, operation: str) -> list[Run]:
        """What a take has brought, held from now on; raises what the server said instead."""
        try:
            items = self._opened(ask, operation)
        except BaseException:
            with self._lock:
                self._asked.remove(ask.number, ask.number)
            raise
        with self._lock:
            self._landed(ask, items)
        return items

    def begin(self, tag: int) -> None:
        """An item that came by a handle is in the user's hands."""
        with self._lock:
            self._leases.remove(tag, tag)
            self._begun.add(tag, tag)

    def not_begun(self, tag: int) -> None:
        """It is not after all: back to the queue."""
        with self._lock:
            self._begun.remove(tag, tag)
        self.give_back((tag, tag))

    def settle(self, tags: Ranges, outcome: Outcome, deadline: float | None) -> None:
        """Settle tags and wait until the server knows.

        Raises:
            LeaseLost: Some had gone back to the queue before, and are not what was settled.
        """
        self.release(tags)
        self._alone()
        (lost,) = self._link.ask(
            "settle", tags, outcome.value, timeout=self._link.remaining(deadline)
        )
        if lost and outcome is not Outcome.RETURNED:
            assert isinstance(lost, int)
            raise LeaseLost(self._link.channel, self._link.me, lost)

    def give_back(self, tags: Ranges) -> None:
        """Return items that were not begun; does not wait."""
        if tags:
            self.release(tags)
            self._link.call("recalled", tags)

    def release(self, tags: Ranges) -> None:
        """Renew these tags no longer."""
        with self._lock:
            self._leases.difference_update(tags)

    def tell(self, news: ChannelError) -> None:
        """The next call raises this."""
        with self._lock:
            if self._failed is None:
                self._failed, self._once = news, True

    # Under the lock

    def _check(self) -> None:
        error = self._failed
        if error is not None:
            if self._once:
                self._failed, self._once = None, False
            raise error

    def _take_done(self) -> Ranges:
        done = self._done.ranges()
        self._done.clear()
        return done

    def _landed(self, ask: Ask, runs: Sequence[Run]) -> None:
        self._confirmed_at = max(self._confirmed_at, ask.sent_at)
        for run in runs:
            self._leases.add(run.order, run.order + run.count - 1)
        self._asked.remove(ask.number, ask.number)

    def _remember(self, tags: Ranges) -> None:
        """Their server has died: whether it knew that they were done, the next one says."""
        self._ended.update(tags)
        self._ended.keep_latest(REMEMBERED_RUNS)

    # Without the lock

    def _opened(self, ask: Ask, operation: str) -> list[Run]:
        tag, crates, held = self._link.read(ask.reply, operation)
        assert isinstance(tag, int) and isinstance(crates, tuple) and isinstance(held, int)
        self._link.bond.held = held
        runs: list[Run] = []
        for crate in crates:
            for run in shelve(Crate(*crate), self._link.channel):
                run.order = tag
                tag += run.count
                runs.append(run)
        return runs

    def _arrived(self, ask: Ask) -> None:
        with self._lock:
            late = ask.abandoned
            if ask.done and not self._link.answered(ask.reply):
                self._remember(ask.done)
        if late:
            self._return(ask)

    def _return(self, ask: Ask) -> None:
        """Nobody wants what has come any more."""
        with suppress(ChannelError, CommError):  # of a refusal there is nothing to give back
            self.give_back(orders_of(self.read(ask, "get")))

    def _wait_for(self, wish: Wish, deadline: float | None, operation: str) -> list[Run]:
        bond = self._link.bond
        while True:
            if not bond.up:
                bond.wait(deadline, operation)
            with self._lock:
                self._check()
            with suppress(ServerAway):
                return self._wait_once(wish, deadline, operation)

    def _alone(self) -> bool:
        """Whether this thread is the only one that takes and settles here, and so settles nothing
        while it waits.
        """
        me = threading.get_ident()
        if self._thread in (0, me):
            self._thread = me
        else:
            self._thread = -1
        return self._thread == me

    def _wait_once(self, wish: Wish, deadline: float | None, operation: str) -> list[Run]:
        limit = self._link.remaining(deadline)
        ask = self.send(wish._replace(alone=self._alone()), limit)
        try:
            ask.reply.wait(None if limit is None else limit + GRACE_S)
        except BaseException as error:
            if self.withdraw(ask):
                if not isinstance(error, CommTimeout):
                    raise
                state = f"{self._link.server} is silent"
                raise Timeout(self._link.channel, operation, limit or 0.0, state) from error
        return self.read(ask, operation)
