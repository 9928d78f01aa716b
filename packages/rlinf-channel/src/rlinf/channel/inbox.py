"""The consumer's side of a channel: items brought along ahead of demand, and acknowledgements.

A get asks for one item and lets the server send a few more, as many as this consumer uses within
`prefetch_s` at its recent pace (and no more than its share of the queue). They wait here, and go
back when others run dry (recall). Acknowledgements travel with the next request.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from rlinf.channel.batching import Crate, cargos
from rlinf.channel.cargo import Cargo
from rlinf.channel.errors import ChannelError, LeaseLost, ServerLost, Timeout
from rlinf.channel.link import GRACE_S, Link, Reply, ServerAway
from rlinf.channel.messages import Outcome
from rlinf.channel.pace import Pace
from rlinf.channel.promise import Promise
from rlinf.channel.session import Session
from rlinf.channel.tags import ranges
from rlinf.channel.wish import Ask, Tagged, Wish
from rlinf.comm.errors import CommError
from rlinf.comm.errors import Timeout as CommTimeout
from rlinf.comm.events import Lost
from rlinf.comm.handle import Handle, TimeoutLike


class Inbox:
    """Takes of one channel object, which is one consumer. Thread-safe."""

    def __init__(self, link: Link, session: Session) -> None:
        self.lease_s = link.config.lease_s
        self.server = link.server
        self.link = self._link = link
        self.session = self._session = session
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._local: deque[Tagged] = deque()
        self._begun: list[int] = []
        """Handed to the user by get; acknowledged by the next get, or by `acknowledge`."""
        self._leases: set[int] = set()
        self._done: list[int] = []
        """Acknowledged by the user; the server hears of it with the next request."""
        self._ahead: Ask | None = None
        """The request for items to bring along, while it is on its way."""
        self._waiting = 0
        self._pace = Pace(link.config)
        self._enough = 0
        """With so many items here no more are asked for: half of what came last. Where they come
        one by one, a get that waits is as quick as one that asks ahead."""
        self._confirmed_at = time.monotonic()
        self._failed: ChannelError | None = None
        self._once = False
        """`_failed` is told once, and then it goes on."""
        session.add(link.number, self)

    # Taking

    def get(self, timeout: TimeoutLike, key: str | None) -> Cargo:
        """The next item; acknowledges those before it."""
        cargo: Cargo | None = None
        with self._lock:
            self._next_turn()
            local = self._local
            stale: list[int] = []
            if local and time.monotonic() - self._confirmed_at > self.lease_s:
                stale = self._drop_local()  # after such a pause it has gone to others
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
        self._bring_along()
        return cargo

    def take(self, wish: Wish, deadline: float | None, operation: str) -> list[Tagged]:
        """Items under a lease of their own; acknowledges what get had handed out."""
        with self._lock:
            self._next_turn()
        self.give_back(self.recalled())
        items = self._wait_for(wish, deadline, operation)
        with self._lock:
            self._leases.update(tag for tag, _ in items)
        return items

    def adopt(self, tags: Sequence[int]) -> None:
        """Treat leased items as handed out by get: the next one acknowledges them."""
        with self._lock:
            self._leases.difference_update(tags)
            self._begun += tags

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
            tags, self._begun = self._begun, []
            if outcome is Outcome.DONE:
                tags = self._take_done() + tags
        if tags:
            self.settle(tags, outcome, deadline)

    def settle(self, tags: Sequence[int], outcome: Outcome, deadline: float | None) -> None:
        """Settle tags and wait until the server knows.

        Raises:
            LeaseLost: Some had gone back to the queue before, and are not what was settled.
        """
        self.release(tags)
        fields = ranges(sorted(tags)), outcome.value
        (lost,) = self._link.ask("settle", *fields, timeout=self._link.remaining(deadline))
        if lost and outcome is not Outcome.RETURNED:
            assert isinstance(lost, int)
            raise LeaseLost(self._link.channel, self._link.me, lost)

    def give_back(self, tags: Sequence[int]) -> None:
        """Return items that were not begun; does not wait."""
        if tags:
            self._link.call("recalled", ranges(sorted(tags)))

    def release(self, tags: Iterable[int]) -> None:
        """Renew these tags no longer."""
        with self._lock:
            self._leases.difference_update(tags)

    # What the session asks

    def renew(self) -> bool:
        """Tell the server that we live, what we hold and what is done."""
        with self._lock:
            done = self._take_done()
            held = [*self._leases, *self._begun, *(tag for tag, _ in self._local)]
            if self._failed is not None or not (held or done or self._waiting):
                return False
        sent_at = time.monotonic()
        fields = ranges(sorted(held)), ranges(sorted(done))
        reply = self._link.call("renew", *fields)
        reply.add_done_callback(lambda answer: self._renewed(answer, sent_at))
        return not reply.done() or reply.exception() is None

    def recalled(self) -> list[int]:
        """Give up what was brought along and not begun; its tags."""
        with self._lock:
            self._pace.forget()
            return self._drop_local()

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
            self._begun.clear()
            self._done.clear()
            self._ahead = None

    def server_back(self, news: ChannelError | None) -> None:
        """The next get goes to the new server."""
        with self._lock:
            if news is not None and self._failed is None:
                self._failed, self._once = news, True

    def server_gone(self, error: ServerLost) -> None:
        """Nothing will come any more."""
        with self._lock:
            self._local.clear()
            self._failed, self._once = error, False

    def farewell(self) -> None:
        """Nobody gets from here any more: tell what is done, give back what is not."""
        with self._lock:
            done = self._take_done()
            left = self._begun + [tag for tag, _ in self._local]
            self._begun.clear()
            self._local.clear()
        if self._failed is None:
            if done:
                self._link.call("settle", ranges(sorted(done)), Outcome.DONE.value)
            self.give_back(left)

    # Under the lock

    def _check(self) -> None:
        error = self._failed
        if error is not None:
            if self._once:
                self._failed, self._once = None, False
            raise error

    def _next_turn(self) -> None:
        if self._failed is not None:
            self._check()
        if self._begun:
            self._done += self._begun
            self._begun.clear()

    def _take_done(self) -> list[int]:
        done, self._done = self._done, []
        return done

    def _begin(self) -> Cargo:
        tag, cargo = self._local.popleft()
        self._begun.append(tag)
        self._pace.used += 1
        return cargo

    def _take_in(self, items: Sequence[Tagged]) -> None:
        self._local.extend(items)
        self._enough = len(self._local) // 2

    def _drop_local(self) -> list[int]:
        tags = [tag for tag, _ in self._local]
        self._local.clear()
        return tags

    # Requests

    def send(self, wish: Wish, timeout_s: float | None) -> Ask:
        """A take on its way."""
        number = next(self._numbers)
        with self._lock:
            done = self._take_done()
            self._waiting += wish.wait
            holds = len(self._leases) + len(self._begun) + len(self._local)
        self._session.hold()
        ask = number, ranges(sorted(done))
        reply = self._link.call("take", ask, (*wish, holds), timeout_s)
        sent = Ask(number, reply)
        reply.add_done_callback(lambda _: self._arrived(sent, wish))
        return sent

    def _arrived(self, ask: Ask, wish: Wish) -> None:
        with self._lock:
            self._waiting -= wish.wait
            late = ask.abandoned
        if late:
            self._return(ask)

    def _return(self, ask: Ask) -> None:
        """Nobody wants what has come any more."""
        if ask.reply.exception() is None:
            try:
                self.give_back([tag for tag, _ in self.read(ask, "get")])
            except ChannelError:
                return  # it was a refusal: there is nothing to give back

    def read(self, ask: Ask, operation: str) -> list[Tagged]:
        """What a take has brought; raises what the server said instead."""
        first, crate, held = self._link.read(ask.reply, operation)
        assert isinstance(first, int) and isinstance(crate, tuple) and isinstance(held, int)
        self._link.bond.held = held
        self._confirmed_at = max(self._confirmed_at, ask.sent_at)
        return list(enumerate(cargos(Crate(*crate)), start=first))

    def _wait_for(self, wish: Wish, deadline: float | None, operation: str) -> list[Tagged]:
        while True:
            try:
                return self._wait_once(wish, deadline, operation)
            except ServerAway:
                self._link.bond.wait(deadline, operation)
                with self._lock:
                    self._check()

    def _wait_once(self, wish: Wish, deadline: float | None, operation: str) -> list[Tagged]:
        if not self._link.bond.up:
            self._link.bond.wait(deadline, operation)
        limit = self._link.remaining(deadline)
        ask = self.send(wish, limit)
        try:
            ask.reply.wait(None if limit is None else limit + GRACE_S)
        except BaseException as error:
            if self.withdraw(ask):
                if not isinstance(error, CommTimeout):
                    raise
                state = f"{self._link.server} is silent"
                raise Timeout(self._link.channel, operation, limit or 0.0, state) from error
        return self.read(ask, operation)

    def withdraw(self, ask: Ask) -> bool:
        """Nobody waits any more: an item that comes later goes back. False: it has come."""
        with self._lock:
            if ask.reply.done():
                return False
            ask.abandoned = True
        self._link.call("cancel", ask.number)
        return True

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
                try:
                    ahead.reply.wait(self._link.remaining(deadline))
                except CommTimeout as error:
                    state = f"{self._link.server} is silent"
                    raise Timeout(self._link.channel, "get", 0.0, state) from error
                self._absorb(ahead)
                items = []
            with self._lock:
                self._check()
                self._pace.arrived()
                if key is not None:
                    ((tag, cargo),) = items
                    self._begun.append(tag)
                    return cargo
                self._take_in(items)
                if self._local:
                    return self._begin()

    def _bring_along(self) -> None:
        ask = self.send(Wish(self._pace.credit, wait=False), None)
        with self._lock:
            self._ahead = ask
        ask.reply.add_done_callback(lambda _: self._absorb(ask))

    def _absorb(self, ask: Ask) -> None:
        """Take in what was brought along: by the callback or the waiting get, whoever is first."""
        if not self._link.answered(ask.reply):
            with self._lock:
                self._ahead = None if self._ahead is ask else self._ahead
            with suppress(ChannelError, CommError):  # tells the bond, which may ask for our lock
                self.read(ask, "get")
            return
        with self._lock:
            if self._ahead is ask:
                self._ahead = None
            if ask.absorbed:
                return
            ask.absorbed = True
            try:
                self._take_in(self.read(ask, "get"))
            except (ChannelError, CommError):
                return  # the next request will say so itself

    def begin(self, tag: int) -> None:
        """An item that came by a handle is in the user's hands."""
        with self._lock:
            self._begun.append(tag)

    def not_begun(self, tag: int) -> None:
        """It is not after all: back to the queue."""
        with self._lock:
            self._begun.remove(tag)
        self.give_back([tag])

    def _renewed(self, answer: Handle[Reply], sent_at: float) -> None:
        try:
            (lost,) = self._link.read(answer, "renew")
        except (ChannelError, CommError):
            return
        with self._lock:
            self._confirmed_at = max(self._confirmed_at, sent_at)
        if lost:
            self.give_back(self.recalled())
