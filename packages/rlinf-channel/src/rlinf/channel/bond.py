"""Bond: a channel object's tie to its server, which may die and come back under its name."""

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from rlinf.channel.errors import ChannelError, ItemsLost, ServerLost
from rlinf.channel.spans import Ranges

log = logging.getLogger(__name__)


class Half(Protocol):
    """The producing or consuming half of a channel object, as its bond sees it."""

    def server_away(self) -> None:
        """What ends with the server is over."""
        ...

    def tell(self, news: ChannelError) -> None:
        """There will be a server again at once: the next call, and it alone, raises this."""
        ...

    def server_back(self) -> None:
        """There is a server again."""
        ...

    def server_gone(self, error: ServerLost) -> None:
        """There will be none: every call raises this."""
        ...


class _State(Enum):
    UP = 1
    AWAY = 2
    GONE = 3


class Bond:
    """Knows which incarnation of the server a channel object talks to, and lets callers wait for
    the next one.

    Args:
        channel: Its name.
        server: The worker that hosts it.
        welcome: (epoch, birth of the channel, what an item survives), from the server.
        reconnect_s: How long a server that died is waited for.
        reunite: Has somebody call `resumed`, `refused` or `expire` until the bond is `settled`.
    """

    def __init__(
        self,
        channel: str,
        server: str,
        welcome: tuple[int, int, str],
        reconnect_s: float,
        reunite: "Callable[[Bond], None]",
    ) -> None:
        self.incarnation, self._birth, self.durability = welcome
        self.held = 0
        """Items in the channel when the server was last heard of."""
        self._channel = channel
        self._server = server
        self._reconnect_s = reconnect_s
        self._reunite = reunite
        self._changed = threading.Condition()
        self._state = _State.UP
        self._since = self._until = 0.0
        self._reason = ""
        self._halves: tuple[Half, ...] = ()
        self._waiters: list[Callable[[], None]] = []
        self.numbers: Callable[[], tuple[int, Ranges]] = lambda: (0, ())
        """The next number of the producing half, and which ones are outstanding."""
        self.accepted: Callable[[], int] = lambda: 0
        """The number after the last one which the server has accepted."""

    def join(self, *halves: Half) -> None:
        """These are to be told what happens."""
        self._halves = halves

    def part(self) -> None:
        """The channel object is gone and has left nothing behind: look for no server any more."""
        with self._changed:
            self._halves, self._state, self._reason = (), _State.GONE, "nobody uses the channel"
            self.numbers = lambda: (0, ())
            self.accepted = lambda: 0

    # What callers ask

    @property
    def up(self) -> bool:
        """Whether there is a server, as far as is known."""
        return self._state is _State.UP

    @property
    def settled(self) -> bool:
        """Whether nobody needs to look for the server (any more)."""
        return self._state is not _State.AWAY

    @property
    def gone_for_good(self) -> bool:
        """Whether there will be no server any more."""
        return self._state is _State.GONE

    def wait(self, deadline: float | None, operation: str) -> None:
        """Wait until there is a server.

        Raises:
            ServerLost: There is none at the deadline, or will not be.
        """
        with self._changed:
            while self._state is _State.AWAY:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            if self._state is not _State.UP:
                raise self.error(operation)

    def error(self, operation: str) -> ServerLost:
        """Why an operation cannot be carried out now."""
        reason = self._reason
        if self._state is _State.AWAY:
            away_s = time.monotonic() - self._since
            reason = f"{reason}; for {away_s:.1f} s it has not come back"
        return ServerLost(self._channel, self._server, operation, reason)

    def then(self, act: Callable[[], None]) -> None:
        """Run `act` once there is a server again, or will not be; at once if that is known."""
        with self._changed:
            if self._state is _State.AWAY:
                self._waiters.append(act)
                return
        act()

    # What happens to the server

    def broken(self, incarnation: int, reason: str) -> None:
        """The incarnation which a request was sent to does not answer it any more."""
        with self._changed:
            if self._state is not _State.UP or incarnation < self.incarnation:
                return
            if not self._reconnect_s:
                self._state, self._reason = _State.GONE, reason
            else:
                self._state, self._reason = _State.AWAY, reason
                self._since = time.monotonic()
                self._until = self._since + self._reconnect_s
        for half in self._halves:
            half.server_away()
        if self._state is _State.AWAY:
            log.warning(
                "channel %s: %s was lost (%s); waiting for it to come back",
                self._channel,
                self._server,
                reason,
            )
            self._reunite(self)
        else:
            self._end()

    def resumed(self, welcome: tuple[int, int, str], accepted: int, expects: int) -> None:
        """The server is back. It was asked when it had `accepted` the numbers of the producing
        half below this one; `expects` is the next that it knew then.
        """
        epoch, birth, self.durability = welcome
        news: ItemsLost | None = None
        lost = self.held if birth != self._birth else max(0, accepted - expects)
        if lost:
            cure = "a spool keeps them (ChannelServer(..., spool=SpoolConfig(folder)))"
            if birth == self._birth:
                cure = "sync='disk' of the spool keeps them where the host dies"
            news = ItemsLost(self._channel, self._server, lost, cure)
            log.error("%s", news)
        if birth != self._birth:
            self._birth, self.held = birth, 0
        if news is not None:
            for half in self._halves:
                half.tell(news)  # before anybody is let on: no item is to come in its stead
        with self._changed:
            if self._state is not _State.AWAY:
                return
            self.incarnation, self._state = epoch, _State.UP
            self._changed.notify_all()
        for half in self._halves:
            half.server_back()
        self._run_waiters()

    def gone(self, reason: str) -> None:
        """It will not come back: it was closed, or refuses us, or we have waited long enough."""
        with self._changed:
            if self._state is _State.GONE:
                return
            self._state, self._reason = _State.GONE, reason
        self._end()

    def expire(self) -> None:
        """Give up if it is time to."""
        if self._state is _State.AWAY and time.monotonic() >= self._until:
            self.gone(f"{self._reason}; it did not come back in {self._reconnect_s:g} s")

    def _end(self) -> None:
        for half in self._halves:
            half.server_gone(self.error("wait"))
        with self._changed:
            self._changed.notify_all()
        self._run_waiters()

    def _run_waiters(self) -> None:
        with self._changed:
            waiters, self._waiters = self._waiters, []
        for act in waiters:
            act()
