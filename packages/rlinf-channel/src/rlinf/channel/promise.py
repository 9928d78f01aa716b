"""Promise: one item that comes by a handle, from this server or from the next."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlinf.channel.batching import cargos
from rlinf.channel.cargo import CLAIM, Cargo
from rlinf.channel.errors import ChannelError, ItemsLost
from rlinf.channel.link import ServerAway, Through
from rlinf.channel.messages import Outcome
from rlinf.channel.wish import Ask, Wish
from rlinf.comm.errors import CommError
from rlinf.comm.handle import Handle

if TYPE_CHECKING:
    from rlinf.channel.inbox import Inbox

_WISH = Wish(alone=False)


class Promise:
    """A take on its way, asked again where the server dies.

    Attributes:
        result: `finish(cargo)` of the item. Whoever completes it otherwise (cancels it) leaves the
            item in the channel.
    """

    def __init__(
        self,
        inbox: "Inbox",
        finish: Callable[[Cargo], object],
        timeout_s: float | None,
        what: str,
    ) -> None:
        self._inbox = inbox
        self._link = inbox.link
        self._finish = finish
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._ask = ask = inbox.send(_WISH, timeout_s)
        self._through = Through(ask.reply)
        self.result: Handle[object] = Handle(what, progress=self._through)
        self.result.add_done_callback(self._completed)
        ask.reply.add_done_callback(lambda _: self._arrived(ask))

    def _completed(self, _: Handle[object]) -> None:
        self._through.completed()
        self._inbox.withdraw(self._ask)

    def _again(self) -> None:
        """There is a server again, or will not be."""
        if not self._link.bond.up:
            self.result.set_error(self._link.bond.error("get"))
        elif not self.result.done():
            ask = self._ask = self._inbox.send(_WISH, self._link.remaining(self._deadline))
            self._through.follow(ask.reply)
            ask.reply.add_done_callback(lambda _: self._arrived(ask))

    def _arrived(self, ask: Ask) -> None:
        if ask.abandoned:
            return
        try:
            (run,) = self._inbox.read(ask, "get")
        except ServerAway:
            self._link.bond.then(self._again)
        except (ChannelError, CommError) as error:
            self.result.set_error(error)
        else:
            (cargo,) = cargos(run)
            if cargo[0] == CLAIM:  # it may take a while, and this thread must not wait
                self._inbox.session.soon(lambda: self._hand_over(run.order, cargo))
            else:
                self._hand_over(run.order, cargo)

    def _hand_over(self, tag: int, cargo: Cargo) -> None:
        try:
            value = self._finish(cargo)
        except (ValueError, ItemsLost) as error:
            self._link.call("settle", (tag, tag), Outcome.REJECTED.value)
            self.result.set_error(error)
            return
        self._inbox.begin(tag)
        if not self.result.set_result(value):
            self._inbox.not_begun(tag)
