"""What a plan is expected to take, whole and by component."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlinf.sched.cost import CostModel
from rlinf.sched.evaluate import evaluate
from rlinf.sched.graph import cycle_name
from rlinf.sched.machine import Machine
from rlinf.sched.plan import Plan
from rlinf.sched.tree import loops
from rlinf.sched.workflow import Workflow


@dataclass(frozen=True, slots=True)
class Prediction:
    """One iteration of a plan.

    Attributes:
        seconds: its length, with the workflow's ``sync_s``.
        busy_s: seconds each component works in it, the members of a cycle in all its rounds.
    """

    seconds: float
    busy_s: Mapping[str, float]


def predict(workflow: Workflow, plan: Plan) -> Prediction:
    """Price a plan, whatever profile it was made from."""
    machine = Machine.of(workflow.devices, workflow.profile)
    model = CostModel(workflow.graph, workflow.profile, machine, workflow.batch)
    line = evaluate(plan.root, model, plan.staleness)
    busy = {name: float((run.finish - run.start).sum()) for name, run in line.runs.items()}
    for loop in loops(plan.root):
        del busy[cycle_name(member.component for member in loop.members)]
        share, times = model.batch / loop.parts, loop.rounds * loop.parts
        busy |= {m.component: times * model.leaf_seconds(m, share, 0) for m in loop.members}
    return Prediction(line.seconds + workflow.profile.sync_s, busy)
