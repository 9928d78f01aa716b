"""How fast a consumer uses items, and so how many to bring along with the next one."""

import time

from rlinf.channel.config import ChannelConfig

FASTEST_S = 1e-6
MEMORY = 0.7


class Pace:
    """Time between a get's return and the next get, smoothed.

    The smoothing is geometric: one hiccup of a fast consumer hardly makes it a slow one, while a
    consumer that has really become slow is known as such after two or three items.
    """

    __slots__ = ("_config", "_handed_at", "_pace_s", "credit")

    def __init__(self, config: ChannelConfig) -> None:
        self._config = config
        self._pace_s: float | None = None
        self._handed_at = 0.0
        self.credit = 1
        """Items to ask for with the next request."""

    def handed(self) -> None:
        """A get returns an item."""
        self._handed_at = time.monotonic()

    def asked(self) -> None:
        """The next get begins."""
        if not self._handed_at:
            return
        pace = max(time.monotonic() - self._handed_at, FASTEST_S)
        old = self._pace_s or pace
        self._pace_s = old**MEMORY * pace ** (1 - MEMORY)
        wanted = self._config.prefetch_s / self._pace_s
        self.credit = max(1, min(self._config.prefetch_items, int(wanted)))

    def forget(self) -> None:
        """Begin anew: what was brought along was not used in time."""
        self._pace_s = None
        self._handed_at = 0.0
        self.credit = 1
