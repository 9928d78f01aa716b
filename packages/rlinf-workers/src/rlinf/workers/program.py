"""What every app's `main` does around its flow: read the configuration, end well.

Exit codes: 0 the run ended well (also after one Ctrl-C), 1 it failed, 2 the configuration cannot be
used, 130 it was interrupted at once (a second Ctrl-C).
"""

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from rlinf.channel.errors import ChannelError
from rlinf.comm.errors import CommError
from rlinf.sched.errors import SchedError
from rlinf.workers.config import Choices, keys, load
from rlinf.workers.errors import ConfigError, WorkerError

__all__ = ["main_guard"]

T = TypeVar("T")
EXPECTED = (WorkerError, ChannelError, CommError, SchedError)


def main_guard(
    run: Callable[[T], None],
    config_class: type[T],
    path: Path,
    argv: Sequence[str] | None = None,
    choices: Choices = MappingProxyType({}),
) -> int:
    """Run `run(config)` and return the process's exit code; the first cause is printed last.

    `choices`: see `rlinf.workers.config.load`.

    What can be foreseen (bad configuration, a worker's death, a full pool, a busy port) is said in
    one paragraph; anything else is a defect and keeps its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(_help(run, config_class))
        return 0
    try:
        config = load(config_class, path, arguments, preset_key="model", choices=choices)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        run(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except EXPECTED as error:
        logging.getLogger("rlinf").debug("the run failed", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _help(run: Callable[[T], None], config_class: type[T]) -> str:
    module = sys.modules[run.__module__]
    known = keys(config_class)
    width = max(map(len, known))
    lines = [f"  {key:<{width}}  {kind}" for key, kind in known.items()]
    return "\n".join(
        [
            (module.__doc__ or "").strip(),
            "",
            "Keys, given as key=value (the last one counts):",
            *lines,
        ]
    )
