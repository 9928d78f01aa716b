"""What the actors have in common: a request until it is answered, and restarts of the server."""

from collections.abc import Callable

from rlinf.channel.messages import ClientId, Commit, Event, Resume
from rlinf.channel.simulation.world import Replaced, World

AGAIN_S = 1.0
"""A request without an answer is sent again after this."""
NOBODY = ClientId("", 0, 0)


class Client:
    """What producers and consumers share: a request until it is answered, and restarts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.id = NOBODY
        self.to = world.incarnation
        self.ready = True
        """Not between the loss of a server and the answer of the next one to `Resume`."""
        world.clients.append(self.notice)

    def notice(self) -> None:
        """The server was lost: turn to the one there is now."""
        if self.to != self.world.incarnation and self.id != NOBODY:
            self.to, self.ready = self.world.incarnation, False
            self.lost()
            self._resume()

    def answered_by_another(self, answer: object) -> bool:
        """Whether the answer only says that there is another server; then turn to it."""
        if isinstance(answer, Replaced):
            self.notice()
        return isinstance(answer, Replaced)

    def resumption(self) -> tuple[str, Resume]:
        """The channel this client puts to, and which of its numbers are outstanding."""
        raise NotImplementedError

    def lost(self) -> None:
        """Forget what ended with the server."""

    def back(self) -> None:
        """Go on with the server there is now."""

    def _resume(self) -> None:
        to, me = self.to, self.id
        if self.ready or self.to != to:
            return
        channel, resume = self.resumption()

        def answer(command: object) -> None:
            if self.answered_by_another(command) or self.ready or (self.to, self.id) != (to, me):
                return
            self.ready = True
            self.back()

        self.world.send(resume, channel, answer, self.to)
        self.world.later(
            AGAIN_S, lambda: self._resume() if (self.to, self.id) == (to, me) else None
        )


class Holder(Client):
    """A client that settles what it holds, one request at a time."""

    channel: str
    request: "Request | None"


class Request:
    """A settlement or a commit, sent until it is answered."""

    def __init__(
        self,
        consumer: Holder,
        event: Event | Commit,
        answered: Callable[[object], None],
        numbers: tuple[int, int] | None = None,
    ) -> None:
        self.consumer = consumer
        self.me = consumer.id
        self.event = event
        self.answered = answered
        self.numbers = numbers
        consumer.request = self
        self._send()

    def _current(self) -> bool:
        return self.consumer.request is self and self.consumer.id == self.me

    def _send(self) -> None:
        if not self._current():
            return
        consumer = self.consumer
        if consumer.ready:
            consumer.world.send(self.event, consumer.channel, self._answer, consumer.to)
        consumer.world.later(AGAIN_S, self._send)

    def _answer(self, command: object) -> None:
        if self.consumer.answered_by_another(command) or not self._current():
            return
        self.consumer.request = None
        self.answered(command)
