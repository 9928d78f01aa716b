"""How fast a consumer uses items, and so how many to bring along with the next one."""

import time

from rlinf.channel.config import ChannelConfig

FASTEST_S = 1e-7
MEMORY = 0.6


class Pace:
    """Seconds an item keeps the consumer busy, smoothed over its requests.

    The smoothing is geometric: one hiccup of a fast consumer hardly makes it a slow one, while a
    consumer that has really become slow is known as such after two or three requests.
    """

    __slots__ = ("_config", "_pace_s", "_since", "credit", "used")

    def __init__(self, config: ChannelConfig) -> None:
        self._config = config
        self._pace_s: float | None = None
        self._since = 0.0
        self.used = 0
        """Items handed out since; counted up by the owner."""
        self.credit = 1
        """Items to ask for with the next request."""

    def arrived(self) -> None:
        """The consumer has waited until now."""
        self._since = time.monotonic()
        self.used = 0

    def asks(self) -> None:
        """A request is about to be sent: reckon."""
        if not self.used:
            return
        now = time.monotonic()
        pace = max((now - self._since) / self.used, FASTEST_S)
        old = self._pace_s or pace
        self._pace_s = old**MEMORY * pace ** (1 - MEMORY)
        self._since, self.used = now, 0
        wanted = self._config.prefetch_s / self._pace_s
        self.credit = max(1, min(self._config.prefetch_items, int(wanted)))

    def forget(self) -> None:
        """Begin anew: what was brought along was not used in time."""
        self._pace_s = None
        self.used = 0
        self.credit = 1
