"""Real workers for tests: a registry, a channel server, and programs in processes of their own."""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import cloudpickle

from rlinf.channel.config import ChannelConfig, SpoolConfig
from rlinf.channel.server import ChannelServer
from rlinf.comm.config import CommConfig
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.registry_server import RegistryServer
from rlinf.comm.testing import PeerProcess, worker


class Program:
    """A function that travels to a fresh process by value, with the module it is defined in.

    A test can so run its own functions elsewhere without that process importing the test.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, endpoint: Endpoint, *args: object) -> None:
        """Run it."""
        self._function(endpoint, *args)

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        module = sys.modules[self._function.__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            return _load, (cloudpickle.dumps(self._function),)
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def _load(data: bytes) -> Program:
    return Program(cloudpickle.loads(data))


def host(
    endpoint: Endpoint, config: ChannelConfig | None = None, spool: SpoolConfig | None = None
) -> None:
    """The program of a channel server's own process: serves until it is told to stop."""
    with ChannelServer(endpoint, config, spool=spool):
        endpoint.send("serving", "test/0")
        endpoint.recv("test/0", timeout=None)


def host_with_little_disk(endpoint: Endpoint, spool: SpoolConfig, most_bytes: int) -> None:
    """`host`, in a process whose files cannot grow beyond that size: a disk that gets full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    host(endpoint, None, spool)


class Rig:
    """A registry in this process, and workers around it over one transport.

    Args:
        transport: inproc, shm or tcp, for every endpoint made here.
    """

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.registry = RegistryServer()
        self.config = CommConfig(backend_priority=(transport,))

    @contextmanager
    def endpoint(self, name: str, **changes: float) -> Iterator[Endpoint]:
        """An endpoint in this process, with these changes to the configuration."""
        config = self.config.with_values(changes)
        with worker(name, self.registry, config) as endpoint:
            yield endpoint

    @contextmanager
    def server(
        self, name: str = "channel/0", config: ChannelConfig | None = None
    ) -> Iterator[ChannelServer]:
        """A channel server in this process."""
        with self.endpoint(name) as endpoint, ChannelServer(endpoint, config) as server:
            yield server

    def process(self, name: str, program: Callable[..., None], *args: object) -> PeerProcess:
        """A worker in a process of its own, running `program(endpoint, *args)`."""
        return PeerProcess(name, self.registry, Program(program), *args, config=self.config)

    def close(self) -> None:
        """End the registry."""
        self.registry.close()

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
