"""The monitor's page: what it tells over HTTP, and whom; what Prometheus reads."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlinf.channel import Channel, ChannelConfig, DeviceLock, Job
from rlinf.channel.curves import POINTS, Curves
from rlinf.channel.exposition import HELP, exposition
from rlinf.channel.observer import JobEnded, Observer, first
from rlinf.channel.testing import Rig
from rlinf.channel.web import FILES, Page, View
from rlinf.comm.testing import eventually

WAIT_S = 30.0
PAGE = Path(__file__).parents[2] / "packages/rlinf-channel/src/rlinf/channel/page"


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig("tcp") as rig:
        yield rig


@contextmanager
def page(rig: Rig, run: Path | None = None) -> Iterator[Page]:
    stop = threading.Event()
    with Observer(Job(rig.registry.address, rig.registry.token.hex())) as observer:
        view = View(observer, "job", run)
        first(observer)
        threads = [
            threading.Thread(target=view.watch, args=(0.05, stop, JobEnded)),
            threading.Thread(target=view.watch_connections, args=(stop,)),
        ]
        for thread in threads:
            thread.start()
        try:
            with Page(view) as page:
                yield page
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def state(page: Page) -> dict:
    return json.loads(get(page.url + "state.json"))


def channels(page: Page) -> list[dict]:
    return state(page).get("server", {"channels": []})["channels"]


def between(seen: dict) -> dict:
    """The connection of the server and its client, as the page has it."""
    pairs = {(c["one"], c.get("other")): c for c in seen["connections"]}
    return pairs.get(("channel/0", "here/0"), {})


def test_it_tells_of_channels_locks_workers_and_connections(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    small = ChannelConfig(max_items=1, put_window_items=0)
    with rig.server(), rig.endpoint("here/0") as here, page(rig, tmp_path) as shown:
        channel = Channel.create("one", here, small)
        channel.put(b"12345", timeout=WAIT_S)
        waiting = channel.put_async(b"x")
        with DeviceLock(here, ["core:0"]).hold((0, 1)):
            eventually(lambda: any(c["waiting"] for c in channels(shown)))
            eventually(lambda: between(state(shown)).get("transport"))
            seen = state(shown)
        assert seen["server"]["channels"][0]["depth"] == 1
        assert seen["server"]["lock"]["holders"][0]["devices"] == ["core:0"]
        assert [peer["id"] for peer in seen["peers"]] == ["channel/0", "here/0", "registry/0"]
        assert between(seen)["transport"] == "tcp" and between(seen)["because"]
        assert seen["curves"] == {"reward": [[1, 0.5]]}
        assert 'rlinf_channel_items{channel="one"} 1' in get(shown.url + "metrics")
        assert channel.get() == b"12345"
        waiting.result(WAIT_S)


def test_who_does_not_know_the_token_gets_nothing(rig: Rig) -> None:
    with rig.server(), page(rig) as shown:
        assert "<!doctype html>" in get(shown.url)
        base = shown.url.rsplit("/", 2)[0]
        for path in ("/", "/state.json", "/guess/", "/guess/state.json", "/guess/metrics"):
            with pytest.raises(urllib.error.HTTPError, match="404") as raised:
                get(base + path)
            raised.value.close()
        assert shown.url.startswith("http://127.0.0.1:")


def test_every_metric_has_its_help_and_type_and_names_are_escaped(rig: Rig) -> None:
    with rig.server(), rig.endpoint("here/0") as here:
        Channel.create('a "name"', here)
        with Observer(Job(rig.registry.address, rig.registry.token.hex())) as observer:
            text = exposition(first(observer))
    assert text.count("# HELP") == text.count("# TYPE") == len(HELP)
    assert r'rlinf_channel_items{channel="a \"name\""} 0' in text
    sample = re.compile(r'[a-z_]+(\{\w+="([^"\\]|\\.)*"(,\w+="([^"\\]|\\.)*")*\})? [-+.\de]+')
    assert all(sample.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))


def test_a_file_of_metrics_is_followed_and_long_curves_are_thinned_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    curves = Curves(file)
    assert curves.read() == {}
    file.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert curves.read() == {"loss": [[1, 0.5]]}
    with file.open("a") as more:
        more.write('ss": 0.25}\n')
    assert curves.read() == {"loss": [[1, 0.5], [2, 0.25]]}
    file.write_text('{"step": 1, "loss": 9}\n')  # it went back
    assert curves.read() == {"loss": [[1, 9]]}
    file.write_text("".join(f'{{"step": {n}, "loss": {n}}}\n' for n in range(3 * POINTS)))
    assert len(Curves(file).read()["loss"]) == POINTS


def test_the_page_needs_nothing_from_elsewhere() -> None:
    texts = [(PAGE / file).read_text() for file, _ in FILES.values()]
    assert {path.name for path in PAGE.iterdir()} == {file for file, _ in FILES.values()}
    addresses = {url for text in texts for url in re.findall(r"https?://[\w./]+", text)}
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of a format, not a place"


def interruptible() -> None:
    """A suite that a shell runs in the background was told to ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_command_prints_where_it_is(rig: Rig, tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"address": rig.registry.address, "token": rig.registry.token.hex()}))
    command = [sys.executable, "-m", "rlinf.channel.monitor", "--web", str(job)]
    with rig.server():
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=interruptible
        ) as process:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert "<!doctype html>" in get(url)
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
        taken = urllib.parse.urlsplit(url).port
        with socket.create_server(("127.0.0.1", taken)):
            done = subprocess.run(
                [*command, "--port", str(taken)], capture_output=True, text=True, timeout=WAIT_S
            )
    assert done.returncode == 1 and f"port {taken} of this machine" in done.stderr
