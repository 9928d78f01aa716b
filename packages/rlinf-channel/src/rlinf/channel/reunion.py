"""Reunion: how a channel object finds a server that came back under its name."""

from dataclasses import asdict

from rlinf.channel.errors import ChannelError, ServerLost
from rlinf.channel.link import Link, read, send
from rlinf.comm.errors import Timeout as CommTimeout

LOOK_S = 1.0
"""How long one look waits for an answer."""


class Reunion:
    """One look for the server at a time: call it until it returns True.

    The server is told which numbers of the producing half may still come. A channel that it does
    not know is made anew with its configuration; the bond says then what was lost.
    """

    def __init__(self, link: Link, capacity: float) -> None:
        self._link = link
        self._capacity = capacity

    def __call__(self) -> bool:
        """Look once; whether there is nothing left to look for."""
        link, bond = self._link, self._link.bond
        if bond.settled:
            return True
        place = link.channel, link.number, 0
        accepted = bond.accepted()  # before: a server that was there all the time accepts more
        fields = asdict(link.config), self._capacity, *bond.numbers()
        reply = send(link.endpoint, link.server, "resume", *place, *fields)
        try:
            reply.wait(LOOK_S)
            values = read(reply, link.channel, link.server, "resume", link.me)
        except (CommTimeout, ServerLost):
            bond.expire()
            return bond.settled
        except ChannelError as error:
            bond.gone(str(error))
            return True
        _, epoch, birth, survives, expects = values
        bond.resumed((epoch, birth, survives), accepted, expects)  # type: ignore[arg-type]
        return True
