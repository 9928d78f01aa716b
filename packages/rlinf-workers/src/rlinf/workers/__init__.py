"""rlinf.workers: groups of workers, the flow between them, and who looks after them.

Names are loaded on first use, so that importing this package is quick and does nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.workers.cluster import Cluster, ClusterConfig
    from rlinf.workers.config import load
    from rlinf.workers.course import Decision, PlanningConfig
    from rlinf.workers.errors import (
        Aborted,
        CallError,
        ClusterClosed,
        ConfigError,
        InfeasiblePlacement,
        MethodUnknown,
        StageError,
        StartError,
        StateLost,
        WorkerDied,
        WorkerError,
        explain,
    )
    from rlinf.workers.group import Group, WorkerGroup, wait_all
    from rlinf.workers.planner import FlowPlanner
    from rlinf.workers.program import main_guard
    from rlinf.workers.records import ChunkRecord, StageReport
    from rlinf.workers.worker import Again, Context, Worker, stage

__all__ = [
    "Aborted",
    "Again",
    "CallError",
    "ChunkRecord",
    "Cluster",
    "ClusterClosed",
    "ClusterConfig",
    "ConfigError",
    "Context",
    "Decision",
    "FlowPlanner",
    "Group",
    "InfeasiblePlacement",
    "MethodUnknown",
    "PlanningConfig",
    "StageError",
    "StageReport",
    "StartError",
    "StateLost",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "explain",
    "load",
    "main_guard",
    "stage",
    "wait_all",
]

_MODULES = {
    "cluster": ("Cluster", "ClusterConfig"),
    "config": ("load",),
    "course": ("Decision", "PlanningConfig"),
    "errors": (
        "Aborted",
        "CallError",
        "ClusterClosed",
        "ConfigError",
        "InfeasiblePlacement",
        "MethodUnknown",
        "StageError",
        "StartError",
        "StateLost",
        "WorkerDied",
        "WorkerError",
        "explain",
    ),
    "group": ("Group", "WorkerGroup", "wait_all"),
    "planner": ("FlowPlanner",),
    "program": ("main_guard",),
    "records": ("ChunkRecord", "StageReport"),
    "worker": ("Again", "Context", "Worker", "stage"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
