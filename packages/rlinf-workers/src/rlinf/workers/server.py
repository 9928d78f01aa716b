"""The process that hosts the channels and the device locks of a job."""

import os
import threading
from dataclasses import dataclass

from rlinf.channel import ChannelServer
from rlinf.comm import CommConfig, Endpoint, Event, Lost, Request
from rlinf.workers.launch.base import Link
from rlinf.workers.messages import CONTROLLER, SERVICE, Hello, Probe, Pulse, Shutdown
from rlinf.workers.tracing import traced_communication

__all__ = ["CHANNELS", "ServerProgram"]

CHANNELS = "channel/0"
HELLO_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """Hosts a `ChannelServer` until told to shut down, or until the controller is gone.

    It has no spool. Nobody starts it again, and a job that is resumed makes what its channels held
    once more, from the position in the data that its checkpoint knows: items of an earlier run
    would be learnt from twice. Whoever wants a channel that outlives jobs runs a server of their
    own, `ChannelServer(endpoint, spool=...)`, under another name, and opens it by `server=`.
    """

    id: str = CHANNELS
    devices: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    comm: CommConfig | None = None

    def run(self, link: Link) -> None:
        """Serve; the main thread only waits for the end."""
        ending = threading.Event()

        def receive(request: Request) -> None:
            request.reply(Pulse.now() if isinstance(request.payload, Probe) else None)
            if isinstance(request.payload, Shutdown):
                ending.set()

        def watch(event: Event) -> None:
            if isinstance(event, Lost) and event.peer == CONTROLLER:
                ending.set()

        with (
            Endpoint(self.id, registry=link.registry, config=self.comm) as endpoint,
            traced_communication(endpoint),
        ):
            endpoint.add_sink(watch)
            endpoint.serve(SERVICE, receive)
            server = ChannelServer(endpoint)
            try:
                hello = Hello(self.id, 0, os.getpid())
                endpoint.call("controller", hello, to=CONTROLLER, timeout=HELLO_S).result(HELLO_S)
                ending.wait()
            finally:
                server.close()
