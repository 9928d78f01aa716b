"""Settings of the planner, and the only place that reads the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from rlinf.sched.document import Node
from rlinf.sched.errors import ConfigError

TRACE_FOLDER = "RLINF_TRACE"
"""Programs write Chrome-trace files into the folder this environment variable names."""

TRACE_KINDS = "RLINF_TRACE_KINDS"
"""Comma-separated kinds of events wanted in the trace."""


TRACED = ("worker_communication", "flow", "all")
"""What `rlinf-profiler --trace` may be asked for."""


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """How hard to look for a plan.

    Attributes:
        micro_batches: the numbers of micro-batches to try; empty: powers of two up to the batch
            and 65,536.
        front_limit: points kept in one front; above it the front is thinned and the plan
            carries a bound.
        tolerance: relative width of the cells used when a front is thinned.
        exact_components: workflows of more components are planned by raising a lower bound on any
            plan, from which the plan's bound comes. Of a chain it may be one more.
        beam: rows kept for each use of devices in a narrow front.
        kind: only plans of this kind, "temporal", "spatial" or "hybrid"; empty: any. The best
            hybrid is the best one found, without a guarantee.
    """

    micro_batches: tuple[int, ...] = ()
    front_limit: int = 2000
    tolerance: float = 0.002
    exact_components: int = 4
    beam: int = 2
    kind: str = ""

    def __post_init__(self) -> None:
        if any(m < 1 for m in self.micro_batches):
            raise ConfigError("micro_batches", f"must be positive, are {self.micro_batches}")
        if self.front_limit < 1:
            raise ConfigError("front_limit", f"must be positive, is {self.front_limit}")
        if self.kind not in ("", "temporal", "spatial", "hybrid"):
            raise ConfigError("kind", f"must be temporal, spatial or hybrid, is {self.kind!r}")
        if not 0 < self.tolerance < 1:
            raise ConfigError("tolerance", f"must be between 0 and 1, is {self.tolerance}")

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "SearchConfig":
        """Read settings; an unknown key is an error which names the nearest.

        Raises:
            ConfigError: names the key and the reason.
        """
        found = Node(data, "", ConfigError).fields((), [field.name for field in fields(cls)])
        given = cls()
        return cls(
            micro_batches=tuple(m.integer(1) for m in found["micro_batches"].items())
            if "micro_batches" in found
            else given.micro_batches,
            front_limit=found["front_limit"].integer(1)
            if "front_limit" in found
            else given.front_limit,
            tolerance=found["tolerance"].number() if "tolerance" in found else given.tolerance,
            exact_components=found["exact_components"].integer(1)
            if "exact_components" in found
            else given.exact_components,
            beam=found["beam"].integer(1) if "beam" in found else given.beam,
            kind=found["kind"].text() if "kind" in found else given.kind,
        )


def trace_folder() -> Path | None:
    """The folder for trace files, if a trace is wanted."""
    folder = os.environ.get(TRACE_FOLDER, "")
    return Path(folder) if folder else None


def is_traced(kind: str) -> bool:
    """Whether a program should record this kind of events: one of `TRACED`."""
    asked = frozenset(os.environ.get(TRACE_KINDS, "").split(",")) - {""}
    return trace_folder() is not None and (not asked or bool(asked & {kind, "all"}))


def traced_environment(folder: Path, kinds: tuple[str, ...]) -> dict[str, str]:
    """The environment of a program that is to write its trace into ``folder``."""
    where = str(folder.resolve())
    return {**os.environ, TRACE_FOLDER: where, TRACE_KINDS: ",".join(kinds)}
