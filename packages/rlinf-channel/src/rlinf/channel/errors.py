"""What can go wrong on a channel or at the device lock.

::

    ChannelError
    ├── ChannelClosed         closed and drained (get), or closed (put)
    ├── ChannelUnknown        no channel of that name on that server
    ├── ChannelBusy           delete of a channel which still holds something
    ├── ConfigMismatch        the name exists with another configuration
    ├── InvalidConfig         a configuration which cannot be meant
    ├── InvalidWeight         a weight that is not a positive finite number
    ├── ItemsLost             the server came back without items that it had acknowledged
    ├── ItemTooLarge          one item alone exceeds the channel's byte bound
    ├── LeaseLost             the lease ran out or ended; its items went to others
    ├── PolicyUnknown         no balancing policy of that name is installed
    ├── ServerLost            the process which hosts the channel is gone
    ├── SpoolFailed           the server's disk failed: it acknowledges nothing any more
    ├── SpoolFull             the server's disk has no room for the items of a put
    ├── SpoolUnusable         the folder cannot be a server's spool (also an OSError)
    ├── Full                  no room within the deadline (also a TimeoutError)
    │   └── Standstill        no room, and whoever could make some waits for this very put
    ├── Timeout               nothing to take within the deadline (also a TimeoutError)
    └── LockTimeout           devices still held by others at the deadline (also a TimeoutError)

An error crosses processes, and pickles, as its class and its `values`: what its constructor takes.
"""

from collections.abc import Iterable

from rlinf.comm.errors import where_to_look


class ChannelError(Exception):
    """Base of every error of this package.

    Attributes:
        values: What the constructor was given, in its order; rebuilds the error elsewhere.
    """

    def __init__(self, message: str, *values: object) -> None:
        super().__init__(message)
        self.add_note(where_to_look(type(self)))
        self.values = values

    def __reduce__(self) -> tuple[type["ChannelError"], tuple[object, ...]]:
        return type(self), self.values or (str(self),)


class ChannelClosed(ChannelError):
    """The channel is closed: nothing more can be put, or nothing more will come.

    A producer gets it at once; a consumer only when the channel is also drained. `lost` counts
    items of earlier puts which had not been acknowledged and are not in the channel.
    """

    def __init__(self, channel: str, operation: str = "get", lost: int = 0) -> None:
        self.channel = channel
        self.operation = operation
        self.lost = lost
        text = f"channel '{channel}' is closed to producers ({operation})"
        if operation not in ("put", "commit"):
            text = f"channel '{channel}' is closed and drained ({operation})"
        if lost:
            text += f"; {lost} item(s) put before came too late and are not in it"
        super().__init__(text, channel, operation, lost)


class ChannelUnknown(ChannelError, LookupError):
    """The server has no channel of this name."""

    def __init__(self, channel: str, server: str, known: Iterable[str] = ()) -> None:
        self.channel = channel
        self.server = server
        self.known = tuple(known)
        names = ", ".join(self.known) or "none"
        super().__init__(
            f"no channel '{channel}' on {server} (it has: {names}); "
            f"call Channel.create('{channel}', ...) first",
            channel,
            server,
            self.known,
        )


class ChannelBusy(ChannelError):
    """A channel can be deleted only once it is closed and drained."""

    def __init__(self, channel: str, state: str) -> None:
        self.channel = channel
        self.state = state
        super().__init__(
            f"channel '{channel}' cannot be deleted: {state}; close it and let consumers drain it",
            channel,
            state,
        )


class ConfigMismatch(ChannelError):
    """The name is taken by a channel with another configuration."""

    def __init__(self, channel: str, differences: str) -> None:
        self.channel = channel
        self.differences = differences
        super().__init__(
            f"channel '{channel}' exists with another configuration ({differences}); "
            f"use Channel.connect, the same configuration, or another name",
            channel,
            differences,
        )


class InvalidConfig(ChannelError, ValueError):
    """A configuration value or key which cannot be meant."""


class InvalidWeight(ChannelError, ValueError):
    """A weight must be a finite number above 0."""

    def __init__(self, channel: str, weight: object) -> None:
        self.channel = channel
        self.weight = weight
        super().__init__(
            f"weight {weight!r} put to channel '{channel}': a weight is a finite number above 0",
            channel,
            weight,
        )


class ItemsLost(ChannelError):
    """The server was restarted, and items that it had acknowledged before are gone.

    Told once to each channel object, by its next call, which has done nothing; after that the
    object works on with the new server.
    """

    def __init__(self, channel: str, server: str, lost: int, cure: str = "") -> None:
        self.channel = channel
        self.server = server
        self.lost = lost
        self.cure = cure
        super().__init__(
            f"{server} was restarted without what was in channel '{channel}': {lost} item(s) that "
            f"were there when it was last heard of are lost{f'; {cure}' if cure else ''}",
            channel,
            server,
            lost,
            cure,
        )


class ItemTooLarge(ChannelError, ValueError):
    """One item exceeds the byte bound of the whole channel, so it can never fit."""

    def __init__(self, channel: str, nbytes: int, bound_bytes: int) -> None:
        self.channel = channel
        self.nbytes = nbytes
        self.bound_bytes = bound_bytes
        super().__init__(
            f"an item of {nbytes} bytes can never fit in channel '{channel}', which holds at most "
            f"{bound_bytes} bytes; raise buffer_size or put smaller items",
            channel,
            nbytes,
            bound_bytes,
        )


class LeaseLost(ChannelError):
    """The lease had ended before it was settled: its items went back to the queue.

    Whatever was computed from them must be dropped: another consumer has the items now.
    """

    def __init__(self, channel: str, consumer: str, lost: int = 0) -> None:
        self.channel = channel
        self.consumer = consumer
        self.lost = lost
        super().__init__(
            f"{consumer} no longer holds {lost} item(s) of channel '{channel}': the lease ran out "
            f"or the connection was lost, and they went back to the queue; drop their results "
            f"(a longer lease_s gives paused consumers more time)",
            channel,
            consumer,
            lost,
        )


class PolicyUnknown(ChannelError, ValueError):
    """No balancing policy of this name is installed."""

    def __init__(self, name: str, known: Iterable[str], nearest: str | None = None) -> None:
        self.name = name
        self.known = tuple(known)
        self.nearest = nearest
        hint = f"; did you mean '{nearest}'?" if nearest else ""
        super().__init__(
            f"no channel policy '{name}' (installed: {', '.join(self.known)}){hint}",
            name,
            self.known,
            nearest,
        )


class ServerLost(ChannelError, ConnectionError):
    """The server of the channel cannot be reached any more."""

    def __init__(self, channel: str, server: str, operation: str, reason: str = "") -> None:
        self.channel = channel
        self.server = server
        self.operation = operation
        self.reason = reason
        super().__init__(
            f"{operation} on channel '{channel}': its server {server} cannot be reached"
            f"{f' ({reason})' if reason else ''}. What it had not acknowledged may be lost; "
            f"see that the server runs and create or connect the channel anew",
            channel,
            server,
            operation,
            reason,
        )


class SpoolFailed(ChannelError):
    """The disk of a server's spool failed, so nothing can be acknowledged truthfully any more.

    What was acknowledged before is on the disk. Repair it and restart the server.
    """

    def __init__(self, folder: str, reason: str) -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(
            f"the spool in {folder} failed: {reason}. The server acknowledges nothing any more; "
            f"repair the disk and restart it: what it acknowledged before is there",
            folder,
            reason,
        )


class SpoolFull(ChannelError):
    """The disk of the server's spool has no room: `lost` items of this or earlier puts are not in.

    Told by the put, or, of items that had been taken over, by the next one; the channel works on.
    """

    def __init__(self, channel: str, reason: str, lost: int = 0) -> None:
        self.channel = channel
        self.reason = reason
        self.lost = lost
        super().__init__(
            f"no room on the server's disk for {lost} item(s) put to channel '{channel}' "
            f"({reason}): they are not in it. Free some space, or let consumers work, and put them "
            f"again",
            channel,
            reason,
            lost,
        )


class SpoolUnusable(ChannelError, OSError):
    """The folder cannot be used as a spool."""

    def __init__(self, folder: str, reason: str) -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(f"cannot keep a spool in {folder}: {reason}", folder, reason)

    def __str__(self) -> str:
        return f"cannot keep a spool in {self.folder}: {self.reason}"


class Full(ChannelError, TimeoutError):
    """The channel had no room within the deadline; ``accepted`` items of the call are in."""

    def __init__(self, channel: str, state: str, accepted: int = 0) -> None:
        self.channel = channel
        self.state = state
        self.accepted = accepted
        super().__init__(
            f"channel '{channel}' had no room within the deadline: {state}; {accepted} item(s) of "
            f"this call were accepted. Add consumers, raise max_items or buffer_size, "
            f"or pass a longer timeout",
            channel,
            state,
            accepted,
        )


class Standstill(Full):
    """There will be no room: all the channel may hold is with consumers that wait for more of it.

    ``accepted`` items of the call are in, the others will not be; putting them again is no use as
    long as the consumers go on like this.
    """

    def __init__(self, channel: str, state: str, accepted: int = 0) -> None:
        self.channel = channel
        self.state = state
        self.accepted = accepted
        ChannelError.__init__(
            self,
            f"channel '{channel}' will never have room: its consumers wait for more before they "
            f"let go of anything: {state}; {accepted} item(s) of this call were accepted. Raise "
            f"buffer_size (or max_items) above what one step of them takes, or have them take and "
            f"acknowledge smaller chunks",
            channel,
            state,
            accepted,
        )


class Timeout(ChannelError, TimeoutError):
    """The operation did not finish within its deadline; nothing was taken."""

    def __init__(self, channel: str, operation: str, timeout_s: float, state: str = "") -> None:
        self.channel = channel
        self.operation = operation
        self.timeout_s = timeout_s
        self.state = state
        super().__init__(
            f"{operation} on channel '{channel}': nothing in {timeout_s:g} s"
            f"{f': {state}' if state else ''}; what is queued stays queued. "
            f"Look at its producers, or pass a longer timeout",
            channel,
            operation,
            timeout_s,
            state,
        )


class LockTimeout(ChannelError, TimeoutError):
    """The devices were not free within the deadline; says who holds them and who waits."""

    def __init__(
        self, devices: Iterable[str], timeout_s: float, holders: str, ahead: str = ""
    ) -> None:
        self.devices = tuple(devices)
        self.timeout_s = timeout_s
        self.holders = holders
        self.ahead = ahead
        super().__init__(
            f"device lock on {', '.join(self.devices)} not granted in {timeout_s:g} s: "
            f"held by {holders or 'nobody'}{f'; first in line {ahead}' if ahead else ''}",
            self.devices,
            timeout_s,
            holders,
            ahead,
        )
