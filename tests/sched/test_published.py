"""The published cases, by the script that writes the table of the documentation."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from rlinf.sched import search

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def paper():
    spec = importlib.util.spec_from_file_location("paper", ROOT / "benchmarks" / "sched_paper.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["paper"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["paper"]


def best(workflow):
    return search(workflow.graph, workflow.profile, workflow.devices, workflow.batch)


def test_case_one(paper):
    plan = best(paper.case_one())
    assert plan.kind == "spatial"
    assert plan.seconds <= 289.15
    assert [len(p.devices) for p in plan.placements().values()] == [80, 16, 32]


def test_case_one_with_the_rollout_halved_is_a_hybrid(paper):
    plan = best(paper.case_one(0.5))
    assert plan.kind == "hybrid"
    assert plan.seconds <= 213.5


def test_predictions_are_within_the_papers_own_errors(paper):
    rows = paper.case_one_rows(json.loads(paper.DATA.read_text()))
    errors = {row.case: row.verdict for row in rows if row.verdict.endswith("%")}
    assert abs(float(errors["16a case1 temporal"].split()[0])) <= 2
    assert abs(float(errors["16a case1 spatial"].split()[0])) <= 5


def test_the_right_mode_wins_wherever_component_times_are_published(paper):
    rows = paper.chain_rows(json.loads(paper.DATA.read_text()))
    assert {row.case: row.verdict for row in rows if row.verdict != "right"} == {}
    assert len(rows) == 6
