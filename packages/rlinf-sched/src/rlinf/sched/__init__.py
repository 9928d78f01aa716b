"""Profile, plan, simulate and explain staged pipelines on shared devices."""

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

__all__ = [
    "Component",
    "ConfigError",
    "DocumentError",
    "ExtrapolationError",
    "FlowGraph",
    "GraphError",
    "InfeasibleError",
    "Leaf",
    "Loop",
    "Parallel",
    "Placement",
    "Plan",
    "PlanError",
    "ProfileError",
    "SchedError",
    "Spatial",
    "Temporal",
    "TraceError",
    "Tree",
    "spatial_plan",
    "temporal_plan",
]
