"""The monitor's page: what it tells over HTTP, and whom; what Prometheus reads."""

import json
import re
import shutil
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
from rlinf.channel.exposition import HELP, exposition
from rlinf.channel.monitor import JobEnded, Observer, first
from rlinf.channel.testing import Rig
from rlinf.channel.web import POINTS, Page, View, curves
from rlinf.comm.testing import eventually

WAIT_S = 30.0
PAGE = Path(__file__).parents[2] / "packages/rlinf-channel/src/rlinf/channel/page.html"


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


def test_long_curves_are_thinned_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"step": {n}, "loss": {n}}}\n' for n in range(3 * POINTS)))
    assert len(curves(file)["loss"]) == POINTS
    assert curves(tmp_path / "none") == {}


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = PAGE.read_text()
    assert not re.findall(r"https?://", text)
    assert "color-scheme: light dark" in text and 'tabindex="0"' in text


def test_the_command_prints_where_it_is(rig: Rig, tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"address": rig.registry.address, "token": rig.registry.token.hex()}))
    command = [sys.executable, "-m", "rlinf.channel.monitor", "--web", str(job)]
    with rig.server():
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
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


@pytest.mark.slow
def test_a_browser_shows_a_full_channel_a_held_lock_and_who_waits(rig: Rig, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium, to render the page")
    small = ChannelConfig(max_items=1, put_window_items=0)
    with rig.server(), rig.endpoint("here/0") as here, page(rig) as shown:
        channel = Channel.create("one", here, small)
        channel.put(b"12345", timeout=WAIT_S)
        waiting = channel.put_async(b"x")
        with DeviceLock(here, ["core:0"]).hold((0, 1)):
            eventually(lambda: any(c["waiting"] for c in channels(shown)))
            flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000")
            done = subprocess.run(
                [browser, *flags, f"--user-data-dir={tmp_path}", "--dump-dom", shown.url],
                capture_output=True,
                text=True,
                timeout=90,
            )
        assert channel.get() == b"12345"
        waiting.result(WAIT_S)
    rows = re.findall(r"<tr>(.*?)</tr>", done.stdout, re.S)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in rows]
    assert any(row[:2] == ["one", "1 of 1"] and row[-1] == "full" for row in cells if row)
    assert any(row[:3] == ["here/0#2", "core:0", "holds"] for row in cells)
    assert any(row[:2] == ["here/0#1", "put one"] for row in cells)
