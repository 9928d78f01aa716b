"""Which transports there are: entry points, loaded on first use."""

import functools
import importlib.metadata
import logging

from rlinf.comm.transports.base import Transport

log = logging.getLogger(__name__)

GROUP = "rlinf.transports"


@functools.cache
def transports() -> tuple[dict[str, type[Transport]], dict[str, str]]:
    """Usable transports by name, and why the others are not."""
    usable: dict[str, type[Transport]] = {}
    missing: dict[str, str] = {}
    for point in sorted(importlib.metadata.entry_points(group=GROUP)):
        try:
            kind: type[Transport] = point.load()
        except ImportError as error:
            missing[point.name] = f"not importable: {error}"
            continue
        reason = kind.missing()
        if reason is None:
            usable[kind.name] = kind
        else:
            missing[kind.name] = reason
    log.debug("transports: %s; missing: %s", ", ".join(usable), missing)
    return usable, missing


def register(kind: type[Transport]) -> None:
    """Make a transport usable that no installed package names (for tests, notebooks)."""
    transports()[0][kind.name] = kind
