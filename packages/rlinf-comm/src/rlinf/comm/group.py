"""Group: collective operations over any set of named workers.

Every member makes a `Group` of the same members and calls the same operations in the same order;
nothing is agreed on beforehand, and no other worker takes part. A worker may be in many groups.
What goes wrong names the member: who is dead (PeerLost), who has not come (Timeout), who does
something else (MessageMismatch). After an error the members are out of step: go on with a new
group, under a new name.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from rlinf.comm.address import WorkerId
from rlinf.comm.codec import Parcel
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.errors import CommError, MessageMismatch, Timeout
from rlinf.comm.handle import DEFAULT, Default, TimeoutLike, together
from rlinf.comm.registry import WorkerRecord
from rlinf.comm.request import Request, describe, rebuild

VERDICT_S: Final = 1.0
"""How much longer than the first member the others wait for its word on who is missing."""

Name = str | WorkerId


class Group:
    """See the module. One thread at a time may use a group.

    Args:
        endpoint: Of this worker, which must be a member.
        members: Ids of all members, in the same order everywhere; results come in this order.
        name: Tells groups of the same members apart.
        host_of: What of a record says where a worker is: between equal ones a broadcast goes
            through shared memory, to the others one copy is sent and passed on there.

    Raises:
        ValueError: The endpoint is no member, or a member is named twice.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        members: Sequence[Name],
        *,
        name: str = "group",
        host_of: Callable[[WorkerRecord], str] = attrgetter("host"),
    ) -> None:
        self.members: Final = tuple(map(WorkerId.parse, members))
        self.name: Final = name
        self.rank: Final = _rank(endpoint.id, self.members)
        self._endpoint = endpoint
        self._host_of = host_of
        self._hosts: dict[WorkerId, str] = {}
        self._tag = _tag(name, self.members)
        self._step = 0

    def broadcast(self, obj: object = None, *, root: Name, timeout: TimeoutLike = DEFAULT) -> Any:
        """Give the root's object to all; returns it (at the root: the object itself).

        It is encoded once, written once a host and sent once to each other host.
        """
        turn, source = self._turn("broadcast", timeout), WorkerId.parse(root)
        self._look_up(turn)
        children = relays(source, self.members, self._hosts)
        if source == self._endpoint.id:
            turn.tell(children.get(source, ()), turn.pack(obj))
            return obj
        parent = next(one for one, to in children.items() if self._endpoint.id in to)
        parcel = turn.hear([parent])[parent]
        turn.tell(children.get(self._endpoint.id, ()), parcel)
        return turn.open(parcel)

    def scatter(
        self,
        objects: Sequence[object] | None = None,
        *,
        root: Name,
        timeout: TimeoutLike = DEFAULT,
    ) -> Any:
        """Give each member its own of the root's objects, one a member; returns one's own.

        Raises:
            ValueError: The root has another number of objects than the group has members.
        """
        turn, source = self._turn("scatter", timeout), WorkerId.parse(root)
        if source != self._endpoint.id:
            return turn.hear([source])[source]
        if objects is None or len(objects) != len(self.members):
            count = "none" if objects is None else str(len(objects))
            raise ValueError(f"scatter needs {len(self.members)} objects at its root, not {count}")
        turn.tell_each(dict(zip(self.members, objects, strict=True)))
        return objects[self.rank]

    def gather(
        self, obj: object, *, root: Name, timeout: TimeoutLike = DEFAULT
    ) -> list[Any] | None:
        """Bring every member's object to the root, in the order of members; None elsewhere."""
        turn, source = self._turn("gather", timeout), WorkerId.parse(root)
        if source != self._endpoint.id:
            turn.tell([source], obj)
            return None
        heard = turn.hear(self._others())
        return [heard.get(member, obj) for member in self.members]

    def all_gather_object(self, obj: object, *, timeout: TimeoutLike = DEFAULT) -> list[Any]:
        """Everybody's objects, in the order of members, at every member.

        Each sends its own to all others, written once a host: no member's memory is a bottleneck.
        """
        turn = self._turn("all_gather_object", timeout)
        turn.tell(self._others(), obj)
        heard = turn.hear(self._others())
        return [heard.get(member, obj) for member in self.members]

    def barrier(self, *, timeout: TimeoutLike = DEFAULT) -> None:
        """Return when all members have called it; the first one tells the others who did not."""
        turn, first = self._turn("barrier", timeout), self.members[0]
        if first != self._endpoint.id:
            turn.tell([first], None)
            turn.extend(VERDICT_S)
            failed = turn.hear([first])[first]
            if failed is not None:
                raise rebuild(failed, first)
            return
        try:
            turn.hear(self._others())
        except CommError as error:
            turn.confess(self._others(), error)
            raise
        turn.tell(self._others(), None)

    def process_group(self, *, timeout: TimeoutLike = DEFAULT) -> Any:
        """A ProcessGroupGloo of torch's of the members, for collectives on host tensors.

        Ranks are positions in `members`. It is made now, by all members, who meet over their
        endpoints: no init_process_group, no port, and it ends when it is dropped.

        Raises:
            Timeout, PeerLost: A member did not come.
        """
        from rlinf.comm.transports.carrier import Notes
        from rlinf.comm.transports.gloo import process_group

        me, others = self._endpoint, self._others()
        service = f"rlinf.group.{self._tag}.{self._step}"

        def tell(note: bytes) -> None:
            for other in others:
                me.call(service, note, to=other, timeout=timeout)

        def hear(request: Request) -> None:
            notes.heard(request.payload)
            request.reply()

        limit = me.config.connection_timeout_s if isinstance(timeout, Default) else timeout
        notes = Notes(tell, limit)
        me.serve(service, hear)
        self.barrier(timeout=timeout)
        return process_group(notes, (self.rank, len(self.members)), me.config.host)

    def _others(self) -> tuple[WorkerId, ...]:
        return tuple(member for member in self.members if member != self._endpoint.id)

    def _turn(self, operation: str, timeout: TimeoutLike) -> "_Turn":
        self._step += 1
        return _Turn(self._endpoint, self._tag, (self.name, self._step, operation), timeout)

    def _look_up(self, turn: "_Turn") -> None:
        if self._hosts:
            return
        registry = self._endpoint.registry
        found = {member: registry.find(member, turn.left()) for member in self.members}
        try:
            self._hosts = {m: self._host_of(h.result(turn.left())) for m, h in found.items()}
        except CommError as error:
            raise turn.explained(error) from error


class _Turn:
    """One operation of a group: its deadline, and how it is told apart from others.

    Args:
        endpoint: Of this member.
        tag: Of the group's messages.
        what: Group, number of the operation, operation.
        timeout: For the whole operation.
    """

    def __init__(
        self, endpoint: Endpoint, tag: int, what: tuple[str, int, str], timeout: TimeoutLike
    ) -> None:
        config = endpoint.config
        self._endpoint = endpoint
        self._tag = tag
        self._name, self._step, self._operation = what
        self._limit = config.connection_timeout_s if isinstance(timeout, Default) else timeout
        self._deadline = None if self._limit is None else time.monotonic() + self._limit

    def left(self) -> float | None:
        """Seconds until the deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def extend(self, seconds: float) -> None:
        """Move the deadline."""
        if self._deadline is not None:
            self._deadline += seconds

    def tell(self, to: Iterable[WorkerId], body: object) -> None:
        """Send all of them the same."""
        try:
            message = (self._step, self._operation, body)
            self._endpoint.broadcast(message, tuple(to), tag=self._tag, timeout=self.left())
        except CommError as error:
            raise self.explained(error) from error

    def tell_each(self, bodies: Mapping[WorkerId, object]) -> None:
        """Send each its own, all at once."""
        others = [(to, body) for to, body in bodies.items() if to != self._endpoint.id]
        try:
            sent = [
                self._endpoint.isend(
                    (self._step, self._operation, body), to, tag=self._tag, timeout=self.left()
                )
                for to, body in others
            ]
            together(sent, f"{self} to {len(sent)} members").result(None)
        except CommError as error:
            raise self.explained(error) from error

    def confess(self, to: Iterable[WorkerId], error: CommError) -> None:
        """Tell whoever can be told that the operation failed; without waiting."""
        message = (self._step, self._operation, describe(error))
        for member in to:
            self._endpoint.isend(message, member, tag=self._tag, timeout=VERDICT_S)

    def hear(self, sources: Sequence[WorkerId]) -> dict[WorkerId, Any]:
        """One message from each; ends at the first that is known not to come."""
        waiting = {
            source: self._endpoint.irecv(source, tag=self._tag, timeout=None) for source in sources
        }
        every = together(list(waiting.values()), str(self))
        try:
            every.result(self.left())
        except Timeout as error:
            missing = [source for source, handle in waiting.items() if not handle.done()]
            if error.peer is not None or not missing:
                raise self.explained(error) from error
            raise self._late(missing) from None
        except CommError as error:
            raise self.explained(error) from error
        finally:
            for handle in waiting.values():
                handle.cancel()
        return {source: self._body(source, handle.result()) for source, handle in waiting.items()}

    def pack(self, obj: object) -> Parcel:
        """A parcel, under the endpoint's rules."""
        return Parcel.pack(obj, allow_pickle=self._endpoint.config.allow_pickle)

    def open(self, parcel: Parcel) -> Any:
        """What a parcel holds, under the endpoint's rules."""
        return parcel.open(allow_pickle=self._endpoint.config.allow_pickle)

    def explained(self, error: CommError) -> CommError:
        """The error, saying in which operation it came up."""
        return type(error)(f"{self}: {error.message}", **error.attributes)

    def _body(self, source: WorkerId, message: Any) -> Any:
        step, operation, body = message
        if (step, operation) != (self._step, self._operation):
            raise MessageMismatch(
                f"{self}: {source} is at its operation {step}, {operation}: all members must call "
                "the same operations in the same order; go on with a group of another name",
                peer=source,
            )
        return body

    def _late(self, missing: Sequence[WorkerId]) -> Timeout:
        return Timeout(
            f"{self}: nothing from {', '.join(map(str, missing))} within {self._limit} s",
            operation=self._operation,
            peer=missing[0],
            timeout_s=self._limit,
        )

    def __str__(self) -> str:
        return f"{self._operation} (operation {self._step} of group {self._name!r})"


def relays(
    root: WorkerId, members: Sequence[WorkerId], hosts: Mapping[WorkerId, str]
) -> dict[WorkerId, tuple[WorkerId, ...]]:
    """Who sends a broadcast to whom: the root to its host and to the first member of each other
    host, which passes it on there.

    Raises:
        ValueError: The root is no member.
    """
    if root not in members:
        raise ValueError(f"{root} is no member of the group: {', '.join(map(str, members))}")
    by_host: dict[str, list[WorkerId]] = {}
    for member in members:
        if member != root:
            by_host.setdefault(hosts[member], []).append(member)
    near = by_host.pop(hosts[root], [])
    plan = {one: tuple(rest) for one, *rest in by_host.values() if rest}
    return {root: (*near, *(one for one, *_ in by_host.values())), **plan}


def _rank(me: WorkerId, members: tuple[WorkerId, ...]) -> int:
    if len(set(members)) != len(members):
        raise ValueError(f"a member is named twice: {', '.join(map(str, members))}")
    if me not in members:
        raise ValueError(f"{me} is no member of the group: {', '.join(map(str, members))}")
    return members.index(me)


def _tag(name: str, members: Iterable[WorkerId]) -> int:
    """A negative tag, which users have no reason to take, the same at all members."""
    text = "\n".join([name, *map(str, members)])
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return -1 - int.from_bytes(digest, "little")
