"""Profile, plan, simulate and explain staged pipelines on shared devices.

Workflows and plans load at once; what computes loads numpy on first use.
"""

import importlib
from typing import TYPE_CHECKING

from rlinf.sched.config import SearchConfig
from rlinf.sched.errors import (
    ConfigError,
    DocumentError,
    ExtrapolationError,
    GraphError,
    InfeasibleError,
    PlanError,
    ProfileError,
    SchedError,
    TraceError,
)
from rlinf.sched.graph import Component, FlowGraph
from rlinf.sched.plan import Placement, Plan, spatial_plan, temporal_plan
from rlinf.sched.tree import Leaf, Loop, Parallel, Spatial, Temporal, Tree

if TYPE_CHECKING:
    from rlinf.sched.drift import DeviationRule, GainRule, Observation, Replan, replay
    from rlinf.sched.explanation import Explanation, explain, robust_plan
    from rlinf.sched.fit import TimeFit, fit_times
    from rlinf.sched.planner import search
    from rlinf.sched.prediction import Prediction, predict
    from rlinf.sched.profile import ComponentProfile, Profile, Sample
    from rlinf.sched.profiler import Profiler, Record
    from rlinf.sched.recorded import recorded_factors, replay_trace, workflow_of
    from rlinf.sched.simulation import (
        Engine,
        LogNormal,
        Observed,
        Reality,
        Simulation,
        profile_engine,
        simulate,
    )
    from rlinf.sched.trace import load_trace
    from rlinf.sched.workflow import Workflow

_LAZY = {
    "drift": ("DeviationRule", "GainRule", "Observation", "Replan", "replay"),
    "explanation": ("Explanation", "explain", "robust_plan"),
    "fit": ("TimeFit", "fit_times"),
    "planner": ("search",),
    "prediction": ("Prediction", "predict"),
    "profile": ("ComponentProfile", "Profile", "Sample"),
    "profiler": ("Profiler", "Record"),
    "recorded": ("recorded_factors", "replay_trace", "workflow_of"),
    "simulation": (
        "Engine",
        "LogNormal",
        "Observed",
        "Reality",
        "Simulation",
        "profile_engine",
        "simulate",
    ),
    "trace": ("load_trace",),
    "workflow": ("Workflow",),
}

__all__ = [
    "Component",
    "ComponentProfile",
    "ConfigError",
    "DeviationRule",
    "DocumentError",
    "Engine",
    "Explanation",
    "ExtrapolationError",
    "FlowGraph",
    "GainRule",
    "GraphError",
    "InfeasibleError",
    "Leaf",
    "LogNormal",
    "Loop",
    "Observation",
    "Observed",
    "Parallel",
    "Placement",
    "Plan",
    "PlanError",
    "Prediction",
    "Profile",
    "ProfileError",
    "Profiler",
    "Reality",
    "Record",
    "Replan",
    "Sample",
    "SchedError",
    "SearchConfig",
    "Simulation",
    "Spatial",
    "Temporal",
    "TimeFit",
    "TraceError",
    "Tree",
    "Workflow",
    "explain",
    "fit_times",
    "load_trace",
    "predict",
    "profile_engine",
    "recorded_factors",
    "replay",
    "replay_trace",
    "robust_plan",
    "search",
    "simulate",
    "spatial_plan",
    "temporal_plan",
    "workflow_of",
]


def __getattr__(name: str) -> object:
    for module, names in _LAZY.items():
        if name in names:
            value = getattr(importlib.import_module(f"rlinf.sched.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
