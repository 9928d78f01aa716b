"""Our own ways to get objects into other processes, beside those of `rivals`."""

import contextlib
from typing import Any

from rivals import ACK, LAST, MANY, QUIET, SECONDS, SPAWN, Rival, touch

from rlinf.comm import CommConfig, Endpoint, RegistryClient, RegistryServer


def serve_endpoints(address: str, token: bytes, transport: str, count: int) -> None:
    """The other process of `Rlinf`: endpoint 0 answers, the others wait to be met."""
    config = CommConfig(backend_priority=(transport,))
    with contextlib.ExitStack() as stack:
        registry = [RegistryClient(address, token) for _ in range(count)]
        all_of_them = [
            stack.enter_context(Endpoint(f"there/{rank}", registry=registry[rank], config=config))
            for rank in range(count)
        ]
        me = all_of_them[0]
        for endpoint in all_of_them[1:]:
            endpoint.serve("hello", lambda request: request.reply(request.payload))
        me.send("ready", "here/0")
        while True:
            obj = me.recv("here/0", timeout=None)
            if obj is None:
                return
            if type(obj) is bytes and obj.startswith(MANY):
                left = int(obj[1:])
                while left:
                    left -= len(me.many.recv("here/0", most=left))
            if type(obj) is not bytes or not obj.startswith(QUIET):
                touch(obj)
                me.send(ACK, "here/0")
            del obj


class Rlinf(Rival):
    """Our endpoints over one transport.

    Args:
        transport: "shm" or "tcp".
        count: How many endpoints there are on the other side.
        registry: Where all register; None: in one of their own.
    """

    def __init__(
        self, transport: str, count: int = 1, registry: RegistryServer | None = None
    ) -> None:
        super().__init__()
        self._registry = registry or RegistryServer()
        config = CommConfig(backend_priority=(transport,))
        self.me = Endpoint("here/0", registry=self._registry, config=config)
        self.start(serve_endpoints, self._registry.address, self._registry.token, transport, count)
        self.me.recv("there/0", timeout=SECONDS)
        used = self.me.statistics().connections["there/0"]
        assert used == transport, f"{used} was taken instead of {transport}"

    def deliver(self, obj: object) -> None:
        """See the module."""
        self.me.send(obj, "there/0")
        self.me.recv("there/0")

    ping = deliver

    def stream(self, data: bytes, count: int) -> None:
        """See the module."""
        quiet = QUIET + data[1:]
        for _ in range(count - 1):
            self.me.send(quiet, "there/0")
        self.deliver(LAST + data[1:])

    def stream_many(self, data: bytes, count: int) -> None:
        """The same messages, handed over and received many at a time."""
        self.me.send(MANY + b"%d" % count, "there/0")
        self.me.many.send([data] * count, "there/0")
        self.me.recv("there/0")

    def empty_like(self, payload: dict[str, Any]) -> dict[str, Any]:
        """A copy of the payload in memory that can be sent as it is."""
        copied = {}
        for name, array in payload.items():
            copied[name] = self.me.empty(array.shape, array.dtype)
            copied[name][...] = array
        return copied

    def meet(self, rank: int) -> None:
        """First contact with another endpoint, there and back."""
        self.me.call("hello", ACK, to=f"there/{rank}").result()

    def close(self) -> None:
        """End the other process and this endpoint."""
        self.me.send(None, "there/0")
        super().close()
        self.me.close()
        self._registry.close()


def serve_mesh(address: str, token: bytes, rank: int, size: int, rounds: int) -> None:
    """One process of `Mesh`: in every round it has an endpoint that has met nobody yet."""
    with contextlib.ExitStack() as stack:
        fresh = [
            stack.enter_context(
                Endpoint(f"mesh{turn}/{rank}", registry=RegistryClient(address, token))
            )
            for turn in range(rounds)
        ]
        me = stack.enter_context(Endpoint(f"mesh/{rank}", registry=RegistryClient(address, token)))
        me.send("ready", "driver/0")
        while (turn := me.recv("driver/0", timeout=None)) is not None:
            others = [f"mesh{turn}/{other}" for other in range(size) if other != rank]
            for other in others:
                fresh[turn].send(ACK, other)
            for other in others:
                fresh[turn].recv(other)
            me.send("done", "driver/0")


class Mesh:
    """Processes that all meet each other.

    Args:
        size: How many.
        rounds: How often they can.
    """

    def __init__(self, size: int, rounds: int) -> None:
        self._registry = RegistryServer()
        self._me = Endpoint("driver/0", registry=self._registry)
        self._names = [f"mesh/{rank}" for rank in range(size)]
        where = self._registry.address, self._registry.token
        self._processes = [
            SPAWN.Process(target=serve_mesh, args=(*where, rank, size, rounds), daemon=True)
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()
        for name in self._names:
            self._me.recv(name, timeout=SECONDS)
        self._turns = iter(range(rounds))

    def meet(self) -> None:
        """All pairs, none of which has met: a message each way has arrived."""
        turn = next(self._turns)
        for name in self._names:
            self._me.send(turn, name)
        for name in self._names:
            self._me.recv(name)

    def close(self) -> None:
        """End the processes."""
        for name in self._names:
            self._me.send(None, name)
        for process in self._processes:
            process.join(SECONDS)
        self._me.close()
        self._registry.close()


def serve_audience(address: str, token: bytes, rank: int) -> None:
    """One receiver of `Audience`."""
    with Endpoint(f"there/{rank}", registry=RegistryClient(address, token)) as me:
        me.send("ready", "here/0")
        while (obj := me.recv("here/0", timeout=None)) is not None:
            touch(obj)
            me.send(ACK, "here/0")
            del obj


class Audience:
    """Processes that are sent the same.

    Args:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        self._registry = RegistryServer()
        self._me = Endpoint("here/0", registry=self._registry)
        self._names = [f"there/{rank}" for rank in range(size)]
        where = self._registry.address, self._registry.token
        self._processes = [
            SPAWN.Process(target=serve_audience, args=(*where, rank), daemon=True)
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()
        for name in self._names:
            self._me.recv(name, timeout=SECONDS)

    def broadcast(self, obj: object, count: int) -> None:
        """The first so many have the object and have said so."""
        self._me.broadcast(obj, self._names[:count])
        for name in self._names[:count]:
            self._me.recv(name)

    def close(self) -> None:
        """End the processes."""
        self._me.broadcast(None, self._names)
        for process in self._processes:
            process.join(SECONDS)
        self._me.close()
        self._registry.close()
