"""Greeter: carries the handshake of links that are not authenticated yet."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rlinf.comm.address import WorkerId
from rlinf.comm.errors import AuthenticationError, CommError, ProtocolError
from rlinf.comm.frame import CHALLENGE, HELLO, PROVE, REFUSE, WELCOME, Incoming, Outgoing
from rlinf.comm.handshake import (
    Acceptor,
    Dialler,
    Party,
    Refusal,
    read_refusal,
    refusal,
)
from rlinf.comm.progress import Loop
from rlinf.comm.timers import Timer
from rlinf.comm.transports.base import Link

log = logging.getLogger(__name__)

TEXT = {
    Refusal.VERSION: "speaks another version of the protocol; install the same rlinf-comm",
    Refusal.TOKEN: "was not convinced that this side holds the registry's token",
    Refusal.WRONG_WORKER: "does not listen here any more, somebody else does",
    Refusal.WRONG_EPOCH: "has been restarted since its record was read",
    Refusal.STALE: "knows a newer incarnation of this worker; this one should end",
    Refusal.DUPLICATE: "has a connection already",
    Refusal.CLOSING: "is closing",
}


class Outcome(Protocol):
    """Who is told how a handshake went; on the dispatching thread."""

    def proved(self, link: Link, peer: Party) -> None:
        """A peer that dialled us is who it says."""

    def welcomed(self, link: Link, epoch: int) -> None:
        """The peer we dialled has accepted."""

    def refused(self, link: Link, code: Refusal, text: str) -> None:
        """The peer we dialled has refused."""

    def failed(self, link: Link, error: BaseException, *, final: bool) -> None:
        """The link we dialled came to nothing."""


@dataclass(slots=True)
class _Dialling:
    target: Party
    shake: Dialler
    epoch: int = 0


class Greeter:
    """The links under way to being connections. All on the dispatching thread.

    Args:
        me: Asked each time, since the epoch is only known after registering.
        token: The registry's secret.
        outcome: Told the result.
        loop: For the deadline of a handshake.
        timeout_s: That deadline.
    """

    def __init__(
        self,
        me: Callable[[], Party],
        token: bytes,
        outcome: Outcome,
        loop: Loop,
        timeout_s: float,
    ) -> None:
        self._me = me
        self._token = token
        self._outcome = outcome
        self._loop = loop
        self._timeout_s = timeout_s
        self._dialling: dict[int, _Dialling] = {}
        self._accepting: dict[int, Acceptor] = {}
        self._timers: dict[int, Timer] = {}

    def dial(self, link: Link, target: Party) -> None:
        """A link of ours is being connected; greet once it is open."""
        link.peer = target.id
        self._dialling[link.number] = _Dialling(target, Dialler(self._me(), target, self._token))
        self._watch(link)

    def opened(self, link: Link) -> None:
        """A link of ours is connected."""
        state = self._dialling.get(link.number)
        if state is not None:
            link.send(Outgoing(HELLO, state.shake.hello))

    def accept(self, link: Link) -> None:
        """A peer has dialled."""
        self._accepting[link.number] = Acceptor(self._me(), self._token)
        self._watch(link)

    def is_shaking(self, link: Link) -> bool:
        """Whether the link's frames are ours to read."""
        return link.number in self._dialling or link.number in self._accepting

    def frame(self, link: Link, frame: Incoming) -> None:
        """A frame of the handshake has come."""
        if not self.is_shaking(link):
            return
        try:
            if link.number in self._dialling:
                self._answer_to_dial(link, frame)
            else:
                self._answer_to_accept(link, frame)
        except CommError as error:
            log.warning("handshake with %s: %s", link.peer, error)
            mine = self._done(link)
            link.close(str(error))
            if mine:
                self._outcome.failed(link, error, final=True)

    def welcome(self, link: Link) -> None:
        """Let the peer in."""
        self._done(link)
        link.authenticate()
        link.send(Outgoing(WELCOME))

    def refuse(self, link: Link, code: Refusal, epoch: int, who: WorkerId) -> None:
        """Do not."""
        self._done(link)
        link.send(Outgoing(REFUSE, refusal(code, epoch, f"{who} {TEXT[code]}")))
        link.close(TEXT[code])

    def lost(self, link: Link, reason: str) -> bool:
        """A link is gone; says whether it was still shaking."""
        state = self._dialling.get(link.number)
        shaking = self.is_shaking(link)
        self._done(link)
        if state is not None:
            where = f"{state.target.id} over {link.transport}"
            error = link.failure or ConnectionError(f"{where}: {reason}")
            self._outcome.failed(link, error, final=link.failure is not None)
        return shaking

    def _watch(self, link: Link) -> None:
        def expire() -> None:
            if self.is_shaking(link):
                link.close(f"no answer within {self._timeout_s} s")

        self._timers[link.number] = self._loop.call_later(self._timeout_s, expire)

    def _done(self, link: Link) -> bool:
        """Forget a link; says whether it was one of ours that was being dialled."""
        timer = self._timers.pop(link.number, None)
        if timer is not None:
            timer.cancel()
        self._accepting.pop(link.number, None)
        return self._dialling.pop(link.number, None) is not None

    def _answer_to_dial(self, link: Link, frame: Incoming) -> None:
        state = self._dialling[link.number]
        if frame.kind == CHALLENGE:
            proof, state.epoch = state.shake.prove(frame.header)
            link.send(Outgoing(PROVE, proof))
        elif frame.kind == WELCOME and state.epoch:
            self._done(link)
            link.authenticate()
            self._outcome.welcomed(link, state.epoch)
        elif frame.kind == REFUSE:
            self._done(link)
            code, _, text = read_refusal(frame.header)
            link.close(text)
            self._outcome.refused(link, code, text)
        else:
            raise ProtocolError(f"frame {frame.kind} out of turn from {state.target.id}")

    def _answer_to_accept(self, link: Link, frame: Incoming) -> None:
        shake = self._accepting[link.number]
        me = self._me()
        if frame.kind == HELLO and shake.peer is None:
            answer = shake.challenge(frame.header)
            if isinstance(answer, Refusal):
                self.refuse(link, answer, me.epoch, me.id)
            else:
                link.send(Outgoing(CHALLENGE, answer))
        elif frame.kind == PROVE and shake.peer is not None:
            if not shake.proven(frame.header):
                self.refuse(link, Refusal.TOKEN, 0, me.id)
                raise AuthenticationError(
                    f"{shake.peer.id} tried to connect without the registry's token",
                    peer=shake.peer.id,
                )
            link.peer, link.epoch = shake.peer.id, shake.peer.epoch
            self._outcome.proved(link, shake.peer)
        else:
            raise ProtocolError(f"frame {frame.kind} out of turn from an unknown peer")
