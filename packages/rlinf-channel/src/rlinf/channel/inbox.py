"""The consumer's side of a channel: items brought along ahead of demand, and acknowledgements.

A get asks for one item and lets the server send a few more, as many as this consumer uses within
`prefetch_s` at its recent pace (and no more than its share of the queue). They wait here, and go
back when others run dry (recall). Acknowledgements travel with the next request.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from rlinf.channel.batching import cargos
from rlinf.channel.cargo import Cargo
from rlinf.channel.errors import ChannelError, ServerLost, Timeout
from rlinf.channel.link import Link, Reply
from rlinf.channel.messages import Outcome
from rlinf.channel.pace import Pace
from rlinf.channel.promise import Promise
from rlinf.channel.run import Run
from rlinf.channel.session import Session
from rlinf.channel.spans import Ranges, Spans, orders_of
from rlinf.channel.takes import Takes
from rlinf.channel.wish import Ask, Wish
from rlinf.comm.errors import CommError
from rlinf.comm.errors import Timeout as CommTimeout
from rlinf.comm.events import Lost
from rlinf.comm.handle import Handle, TimeoutLike


class Inbox(Takes):
    """Takes of one channel object, which is one consumer. Thread-safe."""

    def __init__(self, link: Link, session: Session) -> None:
        super().__init__(link, session)
        self.lease_s = link.config.lease_s
        self.server = link.server
        self._ahead: Ask | None = None
        """The request for items to bring along, while it is on its way."""
        self._pace = Pace(link.config)
        self._enough = 0
        """With so many items here no more are asked for: half of what came last. Where they come
        one by one, a get that waits is as quick as one that asks ahead."""
        session.add(link.number, self)

    # Taking

    def get(self, timeout: TimeoutLike, key: str | None) -> Cargo:
        """The next item; acknowledges those before it."""
        cargo: Cargo | None = None
        with self._lock:
            self._next_turn()
            local = self._local
            stale: Ranges = ()
            if local and time.monotonic() - self._confirmed_at > self.lease_s:
                stale = local.clear()  # after such a pause it has gone to others
            elif local and key is None:
                cargo = self._begin()
                if len(local) >= self._enough or self._ahead is not None:
                    return cargo
                self._pace.asks()
            else:
                cargo = None
        if stale or cargo is None:
            self.give_back(stale)
            return self._get_one(timeout, key)
        self._bring_along(Wish(self._pace.credit, wait=False))
        return cargo

    def take(self, wish: Wish, deadline: float | None, operation: str) -> list[Run]:
        """Items under a lease of their own; acknowledges what get had handed out."""
        with self._lock:
            self._next_turn()
            here = self._batch_here(wish)
        if not here:
            self._land(deadline, operation)
            with self._lock:
                here = self._batch_here(wish)
                unwanted = () if here else self._local.clear()
                self._pace.asks()
            self.give_back(unwanted)
        runs = here or self._wait_for(wish._replace(along=self._along(wish)), deadline, operation)
        with self._lock:
            if not here:
                self._pace.arrived()
                if wish.even:
                    self._take_in(runs)
                    runs = self._local.take(min(wish.even, len(self._local)))
                    self._enough = len(self._local) // 2
            for run in runs:
                self._pace.used += run.count
                self._leases.add(run.order, run.order + run.count - 1)  # if it came along before
            more = wish.even and len(self._local) < self._enough and self._ahead is None
            if more:
                self._pace.asks()
        if more and wish.even <= self._pace.credit:
            self._bring_along(wish._replace(along=self._along(wish), wait=False))
        return runs

    def _along(self, wish: Wish) -> int:
        """How many items a batch may bring along, which are batches of the same kind."""
        size = wish.even
        return max(self._pace.credit // size * size - size, 0) if size else 0

    def adopt(self, tags: Ranges) -> None:
        """Treat leased items as handed out by get: the next one acknowledges them."""
        with self._lock:
            self._leases.difference_update(tags)
            self._begun.update(tags)

    def get_async(
        self, timeout_s: float | None, finish: Callable[[Cargo], object]
    ) -> Handle[object]:
        """One item, as `finish(cargo)`. If the handle is done before, the item goes back."""
        with self._lock:
            self._next_turn()
            cargo = self._begin() if self._local else None
        what = f"get from channel {self._link.channel}"
        if cargo is None:
            return Promise(self, finish, timeout_s, what).result
        result: Handle[object] = Handle(what)
        result.set_result(finish(cargo))
        return result

    # Settling

    def acknowledge(self, deadline: float | None, outcome: Outcome = Outcome.DONE) -> None:
        """Tell the server of what get has handed out; returns when it knows.

        DONE: of everything so far. REJECTED: what came last is unusable, and counted apart.

        Raises:
            LeaseLost: Some of it had gone back to the queue before.
        """
        with self._lock:
            self._check()
            if outcome is Outcome.DONE:
                for earlier in (self._ended, self._done):
                    self._begun.absorb(earlier)
            last = self._begun.ranges()
            self._begun.clear()
        if last:
            self.settle(last, outcome, deadline)

    # What the session asks

    def renew(self) -> bool:
        """Tell the server that we live, what we hold and what is done."""
        with self._lock:
            done = self._take_done()
            held = Spans(self._leases.ranges())
            held.update(self._begun.ranges())
            held.update(self._local.ranges())
            asked = self._asked.ranges()
            if self._failed is not None or not (held or done or asked):
                return False
        sent_at = time.monotonic()
        reply = self._link.call("renew", held.ranges(), done, asked)
        reply.add_done_callback(lambda answer: self._renewed(answer, sent_at))
        return not reply.done() or reply.exception() is None

    def recalled(self) -> Ranges:
        """Give up what was brought along and not begun; its tags."""
        with self._lock:
            self._pace.forget()
            return self._local.clear()

    def server_lost(self, lost: Lost) -> None:
        """An incarnation of the server is gone; see `Bond`."""
        if lost.clean:
            self._link.bond.gone(lost.reason)
        else:
            self._link.bond.broken(lost.epoch, lost.reason)

    # What the bond tells

    def server_away(self) -> None:
        """Nothing that is here is ours any more: leases end with the server that gave them."""
        with self._lock:
            self._local.clear()
            self._remember(self._take_done())
            self._remember(self._begun.ranges())
            self._begun.clear()
            self._ahead = None

    def server_back(self) -> None:
        """The next get goes to the new server."""

    def server_gone(self, error: ServerLost) -> None:
        """Nothing will come any more."""
        with self._lock:
            self._local.clear()
            self._failed, self._once = error, False

    def farewell(self) -> None:
        """Nobody gets from here any more: tell what is done, give back what is not."""
        with self._lock:
            done = self._take_done()
            begun, local = self._begun.ranges(), self._local.clear()
            self._begun.clear()
        if self._failed is None:
            if done:
                self._link.call("settle", done, Outcome.DONE.value)
            self.give_back(begun)
            self.give_back(local)

    # Under the lock

    def _next_turn(self) -> None:
        if self._failed is not None:
            self._check()
        if self._begun:
            self._done.absorb(self._begun)

    def _begin(self) -> Cargo:
        tag, cargo = self._local.pop()
        self._begun.add(tag, tag)
        self._pace.used += 1
        return cargo

    def _take_in(self, runs: Sequence[Run]) -> None:
        self._leases.difference_update(orders_of(runs))
        self._local.add(runs)
        self._enough = len(self._local) // 2

    def _batch_here(self, wish: Wish) -> list[Run]:
        """The whole batch, if it came along with the one before."""
        local, count = self._local, wish.even
        if not count or len(local) < count:
            return []
        if time.monotonic() - self._confirmed_at > self.lease_s:
            return []  # after such a pause it has gone to others
        return local.take(count)

    # Requests

    def _get_one(self, timeout: TimeoutLike, key: str | None) -> Cargo:
        deadline = self._link.deadline(timeout)
        while True:
            with self._lock:
                ahead = self._ahead if key is None else None
                self._pace.asks()
            if ahead is None:
                wish = Wish(self._pace.credit if key is None else 1, key=key)
                what = "get" if key is None else f"get of key {key!r}"
                items = self._wait_for(wish, deadline, what)
            else:
                self._land(deadline, "get")
                items = []
            with self._lock:
                if not items:
                    self._check()
                self._pace.arrived()
                if key is not None:
                    (run,) = items
                    (cargo,) = cargos(run)
                    self._leases.remove(run.order, run.order)
                    self._begun.add(run.order, run.order)
                    return cargo
                self._take_in(items)
                if self._local:
                    return self._begin()

    def _bring_along(self, wish: Wish) -> None:
        ask = self.send(wish, None)
        with self._lock:
            self._ahead = ask
        ask.reply.add_done_callback(lambda _: self._absorb(ask))

    def _land(self, deadline: float | None, operation: str) -> None:
        """Wait for what is being brought along, if anything is: it comes before what comes next."""
        ahead = self._ahead
        if ahead is None:
            return
        try:
            ahead.reply.wait(self._link.remaining(deadline))
        except CommTimeout as error:
            state = f"{self._link.server} is silent"
            raise Timeout(self._link.channel, operation, 0.0, state) from error
        self._absorb(ahead)

    def _absorb(self, ask: Ask) -> None:
        """Take in what was brought along: by the callback or the waiting get, whoever is first."""
        if not self._link.answered(ask.reply):
            with self._lock:
                self._ahead = None if self._ahead is ask else self._ahead
            with suppress(ChannelError, CommError):  # tells the bond, which may ask for our lock
                self.read(ask, "get")
            return
        try:
            items = self._opened(ask, "get")
        except (ChannelError, CommError):
            items = []  # the next request will say so itself
        with self._lock:
            if self._ahead is ask:
                self._ahead = None
            if not ask.absorbed:
                ask.absorbed = True
                self._landed(ask, items)
                self._take_in(items)

    def _renewed(self, answer: Handle[Reply], sent_at: float) -> None:
        try:
            (lost,) = self._link.read(answer, "renew")
        except (ChannelError, CommError):
            return
        with self._lock:
            self._confirmed_at = max(self._confirmed_at, sent_at)
        if lost:
            self.give_back(self.recalled())
