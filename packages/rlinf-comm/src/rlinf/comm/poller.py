"""Poller: waits for file descriptors and for a kick from another thread, one call a round."""

import contextlib
import logging
import math
import os
import select
import selectors
from collections.abc import Callable

log = logging.getLogger(__name__)

READ, WRITE = 1, 4  # EPOLLIN, EPOLLOUT; the values serve as our own flags too
Ready = Callable[[int], None]


class Poller:
    """Level-triggered readiness: epoll where there is one, else what `selectors` finds.

    Attributes:
        pauses: Whether a descriptor may be registered with nothing to look for.
        rests: Whether a second thread may `rest` while another one polls.
    """

    def __init__(self) -> None:
        self._callbacks: dict[int, Ready] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self.pauses = self._epoll is not None
        self._selector = None if self._epoll else selectors.DefaultSelector()
        if hasattr(os, "eventfd"):
            self._wake_in = self._wake_out = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._wake_in, self._wake_out = os.pipe()
            os.set_blocking(self._wake_in, False)
        self.register(self._wake_in, self._drain)
        self.rests = self._epoll is not None and hasattr(os, "eventfd")
        if self._epoll and self.rests:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._watch = select.poll()
            self._watch.register(self._epoll, select.POLLIN)
            self._watch.register(self._bell, select.POLLIN)

    def register(self, fd: int, callback: Ready) -> None:
        """Call `callback(flags)` from `poll` whenever the descriptor is readable."""
        self._callbacks[fd] = callback
        if self._epoll:
            self._epoll.register(fd, READ)
        elif self._selector:
            self._selector.register(fd, selectors.EVENT_READ)

    def modify(self, fd: int, flags: int) -> None:
        """Ask for READ, WRITE, both, or nothing (where it `pauses`) from now on."""
        if self._epoll:
            self._epoll.modify(fd, flags)
        elif self._selector:
            mask = (selectors.EVENT_READ if flags & READ else 0) | (
                selectors.EVENT_WRITE if flags & WRITE else 0
            )
            self._selector.modify(fd, mask)

    def unregister(self, fd: int) -> None:
        """Forget a descriptor; before it is closed, else its number may already be another's."""
        if self._callbacks.pop(fd, None) is None:
            return
        if self._epoll:
            self._epoll.unregister(fd)
        elif self._selector:
            self._selector.unregister(fd)

    def kick(self) -> None:
        """Make the current or next `poll` return at once; from any thread."""
        os.write(self._wake_out, b"\1\0\0\0\0\0\0\0")

    def poll(self, timeout_s: float | None) -> None:
        """Wait up to `timeout_s` and run the callbacks of all ready descriptors."""
        for fd, flags in self._epoll.poll(timeout_s) if self._epoll else self._select(timeout_s):
            callback = self._callbacks.get(fd)
            if callback is None:
                continue
            try:
                callback(flags)
            except Exception:
                log.exception("the callback of descriptor %d raised", fd)

    def rest(self, timeout_s: float | None) -> None:
        """Wait up to `timeout_s` until `poll` has something to do, or `ring` is called."""
        self._watch.poll(None if timeout_s is None else math.ceil(1000 * timeout_s))

    def hush(self) -> None:
        """Forget that `ring` was called."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, 8)

    def ring(self) -> None:
        """Make every `rest` return at once until `hush`; from any thread."""
        os.write(self._bell, b"\1\0\0\0\0\0\0\0")

    def close(self) -> None:
        """Give the descriptors back."""
        if self.rests:
            os.close(self._bell)
        if self._epoll:
            self._epoll.close()
        elif self._selector:
            self._selector.close()
        os.close(self._wake_in)
        if self._wake_out != self._wake_in:
            os.close(self._wake_out)

    def _select(self, timeout_s: float | None) -> list[tuple[int, int]]:
        assert self._selector is not None
        found = self._selector.select(timeout_s)
        return [
            (
                key.fd,
                (READ if mask & selectors.EVENT_READ else 0)
                | (WRITE if mask & selectors.EVENT_WRITE else 0),
            )
            for key, mask in found
        ]

    def _drain(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_in, 8)
