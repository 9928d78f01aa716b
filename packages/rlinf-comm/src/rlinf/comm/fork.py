"""Fork detection: a child must not use, close or credit what belongs to its parent."""

import functools
import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something to be told, in the child, that it is not the child's."""

    def after_fork(self) -> None:
        """Runs in the child, before anything else does."""


_guarded: "weakref.WeakSet[Forkable]" = weakref.WeakSet()


def guard(thing: Forkable) -> None:
    """Call `thing.after_fork()` in every child forked from now on."""
    _guarded.add(thing)
    _install()


@functools.cache
def _install() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_tell)


def _tell() -> None:
    for thing in list(_guarded):
        thing.after_fork()
