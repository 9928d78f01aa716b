"""ChannelServer: serves channels and the device lock on an endpoint it is given.

It decides nothing itself: requests become events of the pure `Hub` and `LockCore`, and their
commands become replies. Payload stays closed. The thread that brings a request never waits here;
one more thread, asleep until the next deadline, keeps time.
"""

import math
import time
from collections.abc import Callable

from rlinf.channel.alarm import Alarm
from rlinf.channel.archive import Archive
from rlinf.channel.config import ChannelConfig, SpoolConfig
from rlinf.channel.errors import ServerLost
from rlinf.channel.link import MONITOR_SERVICE, OK, SERVICE, describe
from rlinf.channel.lock import LOCK_SERVICE
from rlinf.channel.lock_service import LockService
from rlinf.channel.service import ChannelService
from rlinf.channel.spool import Spool
from rlinf.channel.statistics import ServerStatistics
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.events import Event, Lost
from rlinf.comm.request import Request


class ChannelServer:
    """Hosts channels and the device lock, by name, for every worker that reaches its endpoint.

    Whatever it holds lives as long as this process, or with a spool until it is worked off: then
    another server of the same name goes on with it. Several programs may use one server.

    Args:
        endpoint: Where to serve; the server takes the services ``channel``,
            ``channel-monitor`` and ``device-lock`` of it and does not close it.
        config: What a channel gets that is created without a configuration; its `lease_s` is
            also that of the device lock.
        spool: Where to keep what it acknowledges; None: in memory only.

    Raises:
        SpoolUnusable: The folder cannot be written, is in use, or is damaged.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        config: ChannelConfig | None = None,
        *,
        spool: SpoolConfig | None = None,
    ) -> None:
        self._endpoint = endpoint
        config = config or ChannelConfig()
        self._archive = Archive(None if spool is None else Spool(spool))
        self._channels = ChannelService(endpoint, config, self._archive)
        self._alarm = Alarm(f"rlinf-deadlines-{endpoint.id}", self._ring)
        self._locks = LockService(endpoint, config.lease_s, self._archive, self._alarm.before)
        self._closed = False
        self._since = time.monotonic()
        endpoint.add_sink(self._notice)
        endpoint.serve(SERVICE, self._served(self._channels.handle))
        endpoint.serve(LOCK_SERVICE, self._served(self._locks.handle))
        self._alarm.before(time.monotonic())  # for the leases of grants that were found
        endpoint.serve(MONITOR_SERVICE, self._served(self._show))

    def statistics(self) -> ServerStatistics:
        """All channels and the lock."""
        return ServerStatistics(
            str(self._endpoint.id),
            time.monotonic() - self._since,
            self._channels.statistics(),
            self._locks.statistics(),
        )

    def close(self) -> None:
        """Answer whoever waits with `ServerLost` and refuse what comes. Without a spool the items
        held are dropped.
        """
        if self._closed:
            return
        self._closed = True
        self._alarm.close()
        self._channels.close()
        self._locks.close()
        self._archive.close()

    def __enter__(self) -> "ChannelServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _served(self, handle: Callable[[Request], float]) -> Callable[[Request], None]:
        def serve(request: Request) -> None:
            if self._closed:
                channel, server = str(request.payload[1]), str(self._endpoint.id)
                request.reply(describe(ServerLost(channel, server, "request", "it was closed")))
                return
            self._alarm.before(handle(request))

        return serve

    def _show(self, request: Request) -> float:
        request.reply((OK, self.statistics()))
        return math.inf

    def _ring(self, now: float) -> float:
        return min(self._channels.tick(now), self._locks.tick(now))

    def _notice(self, event: Event) -> None:
        if isinstance(event, Lost) and not self._closed:
            self._channels.gone(str(event.peer), event.epoch)
            self._locks.gone(str(event.peer), event.epoch)
