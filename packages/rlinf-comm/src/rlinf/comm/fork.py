"""Fork detection: a child must not use, close or credit what belongs to its parent."""

import functools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


_guarded: "weakref.WeakKeyDictionary[object, Callable[[Any], None]]" = weakref.WeakKeyDictionary()


def guard(thing: T, after_fork: Callable[[T], None]) -> None:
    """Call `after_fork(thing)` in every child forked from now on, before anything else runs."""
    _guarded[thing] = after_fork
    _install()


@functools.cache
def _install() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_tell)


def _tell() -> None:
    for thing, after_fork in list(_guarded.items()):
        try:
            after_fork(thing)
        except Exception:
            log.exception("%r could not be told that it was forked", thing)
