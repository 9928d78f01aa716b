"""Profile, plan, simulate and explain staged pipelines on shared devices."""

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
from rlinf.sched.planner import search
from rlinf.sched.profile import ComponentProfile, Profile, Sample
from rlinf.sched.tree import Leaf, Loop, Parallel, Spatial, Temporal, Tree

__all__ = [
    "Component",
    "ComponentProfile",
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
    "Profile",
    "ProfileError",
    "Sample",
    "SchedError",
    "SearchConfig",
    "Spatial",
    "Temporal",
    "TraceError",
    "Tree",
    "search",
    "spatial_plan",
    "temporal_plan",
]
