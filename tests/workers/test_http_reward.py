import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from rlinf.workers.engines.http_reward import HttpReward, HttpRewardConfig
from rlinf.workers.roles import STATUSES, Group, RewardEngine, Sampling


def decode(ids):
    return "".join(map(chr, ids))


def group_of(texts, item=0):
    width = max(map(len, texts))
    tokens = np.array([[*map(ord, t), *[0] * (width - len(t))] for t in texts], np.int32)
    n = len(texts)
    return Group(
        uid="0",
        prompt_ids=np.array([ord("?")], np.int32),
        tokens=tokens,
        lengths=np.array([len(t) for t in texts], np.int32),
        logprobs=np.zeros(tokens.shape, np.float32),
        finish=np.ones(n, np.uint8),
        versions=np.zeros(n, np.int32),
        sampling=Sampling(),
        item=item,
    )


@contextmanager
def service(answer):
    """A server on the loopback; `answer(number of the request, entries)` -> (status, body)."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body["responses"])
            status, text = answer(len(seen), body["responses"])
            if text is None:  # begins an answer and never ends it
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"{")
                self.wfile.flush()
                released.wait(60)
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    released = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score?kind=x", seen
    finally:
        released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def scores(values):
    return 200, json.dumps({"scores": values})


def statuses(scored):
    return [STATUSES[s] for s in scored.status]


def test_scores_come_back_in_order_whatever_the_batches():
    def answer(_, entries):
        return scores([float(len(e["response"])) for e in entries])

    with service(answer) as (url, seen):
        reward = HttpReward(decode, HttpRewardConfig(url, batch=2, connections=2))
        assert isinstance(reward, RewardEngine)
        first, second = reward.score([group_of(["a", "bb", "ccc"], 5), group_of(["dddd"], 6)])
    assert first.rewards.tolist() == [1, 2, 3] and second.rewards.tolist() == [4]
    entries = sorted((e for batch in seen for e in batch), key=lambda e: e["response"])
    assert entries[0] == {"item": 5, "prompt": "?", "response": "a"}
    assert [len(batch) for batch in seen] == [2, 2]
    assert reward.statistics().requests == 2
    assert (reward.statistics().scored, reward.statistics().unscored) == (4, 0)


def test_what_the_service_cannot_judge_is_unscored_and_not_zero():
    with service(lambda *_: (200, '{"scores": [null, 0, NaN, true, 1]}')) as (url, _):
        (scored,) = HttpReward(decode, HttpRewardConfig(url)).score([group_of(list("abcde"))])
    assert statuses(scored) == ["unscored", "scored", "unscored", "unscored", "scored"]
    assert scored.rewards.dtype == np.float32


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_failure_is_tried_again(status):
    def answer(number, _):
        return (status, "busy") if number < 3 else scores([0.5])

    with service(answer) as (url, seen):
        (scored,) = HttpReward(decode, HttpRewardConfig(url, pause_s=0.0)).score([group_of(["a"])])
    assert scored.rewards.tolist() == [0.5] and len(seen) == 3


@pytest.mark.parametrize(
    ("answer", "requests"),
    [
        ((503, "busy"), 3),
        ((404, "nothing here"), 1),
        ((200, "not json"), 1),
        ((200, '{"scores": [1, 2]}'), 1),
        ((200, '["scores"]'), 1),
    ],
)
def test_tries_are_bounded_and_failures_are_unscored(answer, requests, caplog):
    with service(lambda *_: answer) as (url, seen):
        reward = HttpReward(decode, HttpRewardConfig(url, pause_s=0.0))
        (scored,) = reward.score([group_of(["a"])])
    assert statuses(scored) == ["unscored"] and len(seen) == requests
    assert "gave no scores for 1 responses" in caplog.text
    assert reward.statistics().unscored == 1


def test_an_answer_that_never_ends_is_given_up_at_the_deadline():
    with service(lambda *_: (200, None)) as (url, seen):
        config = HttpRewardConfig(url, deadline_s=0.3, pause_s=0.0)
        (scored,) = HttpReward(decode, config).score([group_of(["a"])])
    assert statuses(scored) == ["unscored"]
    assert len(seen) == 1, "all tries share one deadline"


def test_nobody_listening_is_unscored():
    with service(lambda *_: scores([1])) as (url, _):
        pass
    (scored,) = HttpReward(decode, HttpRewardConfig(url, pause_s=0.0)).score([group_of(["a"])])
    assert statuses(scored) == ["unscored"]


def test_only_what_the_model_wrote_is_sent():
    group = group_of(["yes##no"])
    written = np.array([[1, 1, 1, 0, 0, 1, 1]], bool)
    shown = Group(**{f: getattr(group, f) for f in Group.__slots__} | {"written": written})
    with service(lambda *_: scores([1])) as (url, seen):
        HttpReward(decode, HttpRewardConfig(url)).score([shown])
    assert seen[0][0]["response"] == "yesno"


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="must begin with http"):
        HttpRewardConfig("file:///etc/passwd")
    with pytest.raises(ValueError, match="above 0"):
        HttpRewardConfig("http://localhost", tries=0)
