"""What every app's `main` does around its flow: read the configuration, end well.

Exit codes: 0 the run ended well (also after one Ctrl-C), 1 it failed, 2 the configuration cannot be
used, 130 it was interrupted at once (a second Ctrl-C).
"""

import json
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rlinf.channel.errors import ChannelError
from rlinf.comm.errors import CommError, where_to_look
from rlinf.sched import Plan
from rlinf.sched.errors import SchedError
from rlinf.workers.checkpoint import Checkpoint, newest_checkpoint
from rlinf.workers.config import Choices, combine, layers, origins
from rlinf.workers.errors import ConfigError, WorkerError
from rlinf.workers.options import dump, table
from rlinf.workers.run import METRICS

__all__ = ["described", "main_guard", "run_folder"]

log = logging.getLogger(__name__)

T = TypeVar("T")
CHECKPOINTS = "checkpoints"
"""The folder in a run's folder."""
HELP = frozenset({"-h", "--help"})
FLAGS = HELP | {"--dump-config"}
USAGE = """Arguments are key=value; of a key that is given twice the last one counts.
  config=FILE    takes settings from a YAML file, which other arguments override
  --dump-config  prints the configuration as such a file, with where each value is from
Set LOG_LEVEL=DEBUG to see the traceback of an error.

The keys, as they stand with the other arguments given here:"""
EXPECTED = (WorkerError, ChannelError, CommError, SchedError)


def run_folder(
    app: str, folder: Path | None, resume: bool | Path
) -> tuple[Path, Checkpoint | None]:
    """Where a run is written, and the checkpoint it goes on from; None: it begins.

    Args:
        folder: Where it is to be written; by default `runs/<app>/<time>`, or where the run that is
            resumed is.
        resume: A run folder or one checkpoint's; True: `folder`, or else the newest run below
            `runs/<app>`. One that has no complete checkpoint yet begins, and the log says so.

    Raises:
        ConfigError: There is nothing to resume, or there is and nobody asked for it.
    """
    default = Path("runs") / app
    if resume is False:
        chosen = folder or default / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        found = newest_checkpoint(chosen / CHECKPOINTS)
        if found is not None:
            raise ConfigError(
                f"folder={chosen} holds a run of {found.step} steps: resume=true goes on with it; "
                "for another run give another folder"
            )
        if (chosen / METRICS).exists():
            log.warning("folder=%s holds a run without a checkpoint: it is written over", chosen)
        return chosen, None
    source = folder or max(default.glob("*/"), default=None) if resume is True else Path(resume)
    if source is None or not source.is_dir():
        raise ConfigError(f"resume={resume}: there is no folder {source or default}")
    if source.parent.name == CHECKPOINTS:
        return folder or source.parent.parent, Checkpoint.load(source)
    origin = newest_checkpoint(source / CHECKPOINTS)
    if origin is None:
        log.warning("%s has no complete checkpoint: the run begins", source)
    else:
        log.info("going on after step %d from %s", origin.step, origin.folder)
    return folder or source, origin


def described(config: object, plan: Plan | None) -> dict[str, Any]:
    """What a run is, as JSON has it, to be noted in its checkpoints. `config` is a dataclass.

    Where it is written and what it was resumed from are left out: they are not what it is.
    """
    what = {"config": asdict(config)}  # type: ignore[call-overload]
    if plan is not None:
        what["plan"] = plan.to_dict()
    plain: dict[str, Any] = json.loads(json.dumps(what, default=str))
    for key in ("folder", "resume"):
        plain["config"].pop(key, None)
    return plain


def main_guard(
    run: Callable[[T], None],
    config_class: type[T],
    path: Path,
    argv: Sequence[str] | None = None,
    choices: Choices = MappingProxyType({}),
    preset_key: str = "model",
) -> int:
    """Run `run(config)` and return the process's exit code; the first cause is printed last.

    `choices`, `preset_key`: see `rlinf.workers.config.layers`.

    What can be foreseen (bad configuration, a worker's death, a full pool, a busy port) is said in
    one paragraph; anything else is a defect and keeps its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = {argument for argument in arguments if argument in FLAGS}
    overrides = [argument for argument in arguments if argument not in FLAGS]
    try:
        settings = layers(config_class, path, overrides, preset_key=preset_key, choices=choices)
        config = combine(config_class, settings)
        if flags:
            print(_help(run, config) if flags & HELP else dump(config, origins(settings)))
            return 0
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
        print(f"error: {error} ({where_to_look(type(error))})", file=sys.stderr)
        return 1
    return 0


def _help(run: Callable[[T], None], config: T) -> str:
    about = (sys.modules[run.__module__].__doc__ or "").strip()
    return f"{about}\n\n{USAGE}\n\n{table(config, shutil.get_terminal_size((100, 24)).columns)}"
