"""What a plan is expected to take, whole and by component."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlinf.sched.cost import CostModel
from rlinf.sched.evaluate import evaluate
from rlinf.sched.machine import Machine
from rlinf.sched.plan import Plan
from rlinf.sched.workflow import Workflow


@dataclass(frozen=True, slots=True)
class Prediction:
    """One iteration of a plan.

    Attributes:
        seconds: its length, with the workflow's ``sync_s``.
        busy_s: seconds each component works in it; a cycle is one component.
    """

    seconds: float
    busy_s: Mapping[str, float]


def predict(workflow: Workflow, plan: Plan) -> Prediction:
    """Price a plan, whatever profile it was made from."""
    machine = Machine.of(workflow.devices, workflow.profile)
    model = CostModel(workflow.graph, workflow.profile, machine, workflow.batch)
    line = evaluate(plan.root, model, plan.staleness)
    busy = {name: float((run.finish - run.start).sum()) for name, run in line.runs.items()}
    return Prediction(line.seconds + workflow.profile.sync_s, busy)
