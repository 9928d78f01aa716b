"""Why this plan: the answers a person needs before trusting it."""

from dataclasses import replace

import pytest

from rlinf.sched import Workflow, explain, robust_plan, search
from rlinf.sched.flips import layout

WORKFLOW = Workflow.from_dict(
    {
        "batch": 512,
        "devices": 64,
        "components": {
            "rollout": {"sizes": [2, 4, 8, 16, 32, 64], "times": [[32, 512, 900], [64, 512, 591]]},
            "inference": {"sizes": [4, 8, 16, 32, 64], "times": [[32, 512, 190], [64, 512, 102]]},
            "train": {"sizes": [8, 16, 32, 64], "times": [[32, 512, 680], [64, 512, 368]]},
        },
        "sync_s": 10,
    }
)


def planned():
    w = WORKFLOW
    return search(w.graph, w.profile, w.devices, w.batch)


def test_an_explanation_answers_the_questions():
    found = explain(WORKFLOW, planned())
    assert {"temporal", "spatial"} <= set(found.best_of_kind)
    assert min(found.best_of_kind.values()) == pytest.approx(found.plan.seconds)
    assert found.bottleneck == "rollout"
    assert {share.component for share in found.shares} == set(WORKFLOW.graph.names)
    assert all(0 <= share.idle <= 1 for share in found.shares)
    assert "best of each kind" in found.text()
    assert [cost.kind for cost in found.costs] == list(found.best_of_kind)
    in_turn = next(cost for cost in found.costs if cost.kind == "temporal")
    parts = sum(in_turn.busy_s.values()) + in_turn.switch_s + in_turn.sync_s
    assert parts == pytest.approx(found.best_of_kind["temporal"])


def test_stale_weights_count_for_every_kind():
    stale = replace(WORKFLOW, staleness=1)
    plan = search(stale.graph, stale.profile, stale.devices, stale.batch, staleness=1)
    found = explain(stale, plan, flips=False)
    assert plan.staleness == 1 and plan.seconds < planned().seconds
    assert min(found.best_of_kind.values()) == pytest.approx(plan.seconds)
    assert "temporal" in found.best_of_kind


def test_a_flip_is_where_the_plan_changes():
    found = explain(WORKFLOW, planned())
    finite = [flip for flip in found.flips if flip.slower < 8 or flip.quicker > 0]
    assert finite
    for flip in finite:
        for factor, past in ((flip.slower, 1.02), (flip.quicker, 0.98)):
            if not 0 < factor < 8:
                continue
            profile = WORKFLOW.profile.scaled({flip.component: factor * past})
            plan = search(WORKFLOW.graph, profile, WORKFLOW.devices, WORKFLOW.batch)
            assert layout(plan.root) != layout(found.plan.root)


def test_before_a_flip_the_plan_is_the_same():
    plan = planned()
    found = []
    explain(WORKFLOW, plan, watch=found.append)
    assert [flip.component for flip in found] == list(WORKFLOW.graph.names)
    for flip in found:
        for edge in (min(flip.slower, 8.0) * 0.99, max(flip.quicker, 0.125) * 1.01):
            for share in (0.2, 0.4, 0.6, 0.8, 1.0):
                profile = WORKFLOW.profile.scaled({flip.component: edge**share})
                there = search(WORKFLOW.graph, profile, WORKFLOW.devices, WORKFLOW.batch)
                assert layout(there.root) == layout(plan.root)


def test_a_robust_plan_is_close_to_the_best_everywhere():
    plan, excess = robust_plan(WORKFLOW, noise=0.1, samples=8)
    assert 0 <= excess < 0.1
    assert plan.seconds == pytest.approx(planned().seconds, rel=0.1)


def test_far_sizes_are_noted():
    far = Workflow.from_dict(
        {"batch": 8, "devices": 64, "components": {"a": {"times": [[2, 8, 1.0], [4, 8, 0.6]]}}}
    )
    plan = search(far.graph, far.profile, far.devices, far.batch)
    notes = explain(far, plan, flips=False).notes
    assert any("far from what was measured" in note for note in notes)


def test_members_of_a_cycle_that_share_devices_are_not_counted_twice():
    workflow = Workflow.from_dict(
        {
            "batch": 8,
            "devices": 2,
            "components": {
                "simulator": {"sizes": [2], "times": [[2, 8, 5]]},
                "policy": {"sizes": [1], "times": [[1, 8, 3]]},
            },
            "edges": [["simulator", "policy"], ["policy", "simulator"]],
        }
    )
    plan = search(workflow.graph, workflow.profile, workflow.devices, workflow.batch)
    found = explain(workflow, plan)
    (cost,) = found.costs
    assert list(cost.devices.values()) == [2]
    assert [share.device_seconds for share in found.shares] == [pytest.approx(16)]
