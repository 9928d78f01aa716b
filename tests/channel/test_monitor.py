"""rlinf-monitor: what it shows of a running job, and what becomes of it when the job is not."""

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rlinf.channel import Channel, ChannelConfig, DeviceLock, Job, announce, running_jobs
from rlinf.channel.job import read_job
from rlinf.channel.monitor import find_job, main
from rlinf.channel.observer import NoJob, Observer, first
from rlinf.channel.snapshot import Snapshot, as_json, blocked, rates
from rlinf.channel.statistics import (
    ChannelStatistics,
    ConsumerStatistics,
    Holder,
    LockStatistics,
    ServerStatistics,
    Waiting,
)
from rlinf.channel.terminal import Cell, Screen, paint, svg
from rlinf.channel.testing import Rig, host
from rlinf.channel.view import draw, size
from rlinf.comm.testing import eventually

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jobs are announced in a folder of this test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RLINF_TOKEN", raising=False)
    return tmp_path / "rlinf"


# -- what two snapshots tell ----------------------------------------------------------------------


def channel(name: str = "q", **changes: object) -> ChannelStatistics:
    usual: dict[str, object] = {
        field: 0
        for field in ChannelStatistics.__dataclass_fields__
        if field not in ("name", "policy", "max_items", "consumers", "waiting", "closed")
    }
    usual |= {"policy": "weighted", "max_items": None, "closed": False, "consumers": ()}
    return ChannelStatistics(name=name, **(usual | {"max_bytes": 100} | changes))  # type: ignore[arg-type]


def snapshot(up_s: float, *channels: ChannelStatistics) -> Snapshot:
    return Snapshot(ServerStatistics("channel/0", up_s, channels, LockStatistics((), (), 0, 0)))


def consumer(name: str, finished: float) -> ConsumerStatistics:
    return ConsumerStatistics(name, 1.0, 0, 0.0, 1, finished, 0.0, 0.0, 0)


def test_rates_are_differences_over_the_servers_time() -> None:
    before = snapshot(10.0, channel(put_items=100, put_bytes=1000, acknowledged_items=50))
    after = snapshot(12.0, channel(put_items=140, put_bytes=5000, acknowledged_items=70))
    assert rates(before, after)["q"].put_items == 20.0
    assert rates(before, after)["q"].put_bytes == 2000.0
    assert rates(before, after)["q"].done_items == 10.0


def test_a_new_channel_and_a_new_server_count_from_their_start() -> None:
    after = snapshot(4.0, channel(put_items=40))
    assert rates(snapshot(2.0), after)["q"].put_items == 20.0, "the channel is new"
    assert rates(snapshot(9.0, channel(put_items=900)), after)["q"].put_items == 10.0, "restarted"
    assert rates(snapshot(2.0, channel(put_items=90)), after)["q"].put_items == 20.0, "made again"
    assert rates(None, snapshot(0.0, channel(put_items=40)))["q"].put_items == 0.0


def test_who_waits_for_whom() -> None:
    def holder(name: str, *devices: str) -> Holder:
        return Holder(name, devices, (0,), 1, 2.0)

    a, b = holder("a", "core:0"), holder("b", "core:1")
    c, d = holder("c", "core:1", "core:2"), holder("d", "core:2")
    waits = blocked(LockStatistics((a, b), (c, d), 2, 0))
    assert [(w.waiter.id, [x.id for x in w.behind]) for w in waits] == [("c", ["b"]), ("d", ["c"])]


def test_json_holds_no_number_that_json_does_not_know() -> None:
    idle = channel(consumers=(consumer("a", 5.0), consumer("b", 0.0)))
    shown = json.loads(json.dumps(as_json(snapshot(1.0, idle)), allow_nan=False))
    assert idle.balance == float("inf") and shown["server"]["channels"][0]["balance"] is None


def test_a_picture_fits_its_width_and_prints_what_names_may_hold() -> None:
    consumers = tuple(consumer(f"c/{n}", 1.0) for n in range(100))
    lines = draw("job \x1b[2J", snapshot(1.0, channel("a\nb" + "x" * 50, consumers=consumers)))
    text = paint(lines, 80, colours=False)
    assert max(map(len, text)) == 80
    assert "job ?[2J" in text[0] and text[4].startswith("a?bxx")
    assert any("68 more are not shown" in line for line in text)


def test_a_picture_as_a_file_is_well_formed() -> None:
    lines = draw("<job> & co", snapshot(1.0, channel("x" * 200, consumers=(consumer("c/0", 1.0),))))
    picture = ElementTree.fromstring(svg(lines, 80))
    texts = ["".join(node.itertext()) for node in picture.iter() if node.tag.endswith("text")]
    assert any("<job> & co" in text for text in texts) and max(map(len, texts)) <= 80


def test_a_screen_shows_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "6")
    with io.StringIO() as out, Screen(out) as screen:
        screen.show([[Cell(str(number), "red")] for number in range(20)])
        assert "3" in out.getvalue() and "(16 more lines do not fit)" in out.getvalue()
        screen.show([[Cell("again")]])
        assert "\x1b[5Aagain\x1b[K\n\x1b[J" in out.getvalue(), "in the place of the first"


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, ""), (7, "7 B"), (1234, "1.23 kB"), (5e6, "5 MB"), (123e9, "123 GB")]
)
def test_sizes_are_readable(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


# -- finding a job --------------------------------------------------------------------------------


def test_a_job_is_announced_to_its_user_alone_until_its_end(runtime: Path) -> None:
    with announce("tcp://127.0.0.1:1", b"\1\2", server="channel/7") as path:
        assert path is not None and path.parent == runtime
        assert runtime.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
        (job,) = running_jobs()
        assert (job.address, job.token, job.server) == ("tcp://127.0.0.1:1", "0102", "channel/7")
        assert job.pid == os.getpid() and "0102" not in repr(job)
        assert find_job(None) == find_job(str(os.getpid())) == find_job(str(path)) == job
    assert running_jobs() == () and list(runtime.iterdir()) == []


def test_what_a_killed_job_left_is_swept_away(runtime: Path) -> None:
    program = "import signal; from rlinf.channel import announce\n"
    program += "with announce('tcp://127.0.0.1:1', b'x'): print('up', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert [job.pid for job in running_jobs()] == [process.pid]
        process.kill()
    assert len(list(runtime.iterdir())) == 1
    assert running_jobs() == () and list(runtime.iterdir()) == []


def test_a_later_process_of_the_same_number_is_not_the_job(runtime: Path) -> None:
    with announce("tcp://127.0.0.1:1", b"x") as path:
        assert path is not None
        text = path.read_text()
        path.write_text(json.dumps(json.loads(text) | {"started": 1}))
        assert running_jobs() == () and not path.exists()


def test_a_job_of_another_machine_is_left_alone(runtime: Path) -> None:
    with announce("tcp://127.0.0.1:1", b"x") as path:
        assert path is not None
        path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "other", "pid": 1}))
        assert running_jobs() == () and path.exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"address": 1, "token": "x"}', '{"x": 1}'])
def test_a_file_that_is_no_job_is_an_error_and_hides_no_other(
    runtime: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with announce("tcp://127.0.0.1:1", b"x"):
        bad = runtime / "bad.job.json"
        bad.write_text(text)
        with pytest.raises(ValueError):
            read_job(bad)
        assert len(running_jobs()) == 1 and "bad.job.json" in caplog.text
        with pytest.raises(NoJob, match="is no job file"):
            find_job(str(bad))


def test_a_folder_that_others_may_write_to_is_not_used(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.mkdir()
    runtime.chmod(0o777)
    (runtime / "planted.job.json").write_text('{"address": "tcp://127.0.0.1:1", "token": "00"}')
    with announce("tcp://127.0.0.1:1", b"x") as path:
        assert path is None and "not a folder of this user alone" in caplog.text
        assert running_jobs() == ()


def test_no_job_and_two_jobs_say_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 1
    assert "no job of this user runs here" in capsys.readouterr().err
    with announce("tcp://127.0.0.1:1", b"x"), announce("tcp://127.0.0.1:2", b"y"):
        with pytest.raises(NoJob, match="several jobs"):
            find_job(None)
    with pytest.raises(NoJob, match="RLINF_TOKEN"):
        find_job("tcp://127.0.0.1:1")
    with pytest.raises(NoJob, match="runs no job"):
        find_job("1")


def test_a_registry_that_is_not_there_is_said(runtime: Path) -> None:
    with pytest.raises(NoJob, match="does not answer"):
        Observer(Job("tcp://127.0.0.1:1", "00"), patience_s=0.2)


# -- a running job --------------------------------------------------------------------------------


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig("tcp") as rig:
        yield rig


def job_of(rig: Rig) -> Job:
    return Job(rig.registry.address, rig.registry.token.hex())


def waits(observer: Observer) -> list[Waiting]:
    return [one for c in first(observer).server.channels for one in c.waiting]


def test_it_sees_queues_waits_and_holders(rig: Rig) -> None:
    small = ChannelConfig(max_items=1, put_window_items=0, type="round_robin")
    with rig.server(), rig.endpoint("here/0") as here, Observer(job_of(rig)) as observer:
        one = Channel.create("one", here, small)
        one.put(b"12345", timeout=WAIT_S)
        waiting = one.put_async(b"x")
        asked = Channel.create("two", here).get_async()
        lock = DeviceLock(here, ["core:0"])
        with lock.hold((0, 1)):
            eventually(lambda: len(waits(observer)) == 2)
            seen = first(observer)
        by_name = {channel.name: channel for channel in seen.server.channels}
        assert [(w.operation, w.id) for w in by_name["one"].waiting] == [("put", "here/0#1")]
        assert [w.operation for w in by_name["two"].waiting] == ["take"]
        assert by_name["one"].waiting[0].since_s > 0
        assert (by_name["one"].depth, by_name["one"].max_items) == (1, 1)
        assert (by_name["one"].policy, by_name["one"].put_bytes) == ("round_robin", 5)
        assert [h.devices for h in seen.server.lock.holders] == [("core:0",)]
        assert [p.id for p in seen.peers] == ["channel/0", "here/0", "registry/0"]
        assert one.get() == b"12345"
        waiting.result(WAIT_S)
        asked.cancel()
        eventually(lambda: not waits(observer))


def test_a_stopped_server_is_waited_for_with_one_question(rig: Rig) -> None:
    with rig.endpoint("test/0") as test, rig.process("channel/0", host) as process:
        assert test.recv() == "serving"
        with Observer(job_of(rig)) as observer:
            assert observer.look(WAIT_S) is not None
            os.kill(process.pid, signal.SIGSTOP)
            try:
                assert [observer.look(0.05) for _ in range(3)] == [None] * 3
                sent = observer._endpoint.statistics().sent
                assert observer.look(0.05) is None and observer._endpoint.statistics().sent == sent
                assert observer.silent_s > 0.1
            finally:
                os.kill(process.pid, signal.SIGCONT)
            assert observer.look(WAIT_S) is not None
        test.send("stop", "channel/0")


JOB = """
from rlinf.channel import Channel, ChannelServer, announce
from rlinf.comm import Endpoint, RegistryServer
with (
    RegistryServer() as registry,
    Endpoint("channel/0", registry=registry) as host,
    ChannelServer(host),
    announce(registry.address, registry.token),
):
    Channel.create("samples", host).put_many([b"a", b"b", b"c"])
    print("up", flush=True)
    input()
"""
MONITOR = [sys.executable, "-m", "rlinf.channel.monitor", "--interval", "0.1"]


@pytest.fixture
def job(runtime: Path) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", JOB], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        yield process
        process.kill()


class Live:
    """The live view on a terminal of its own."""

    def __init__(self) -> None:
        self._terminal, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
        self.process = subprocess.Popen(
            MONITOR, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        self.text = ""

    def until(self, words: str) -> None:
        """Read until these words are on the screen."""
        while words not in self.text:
            self.text += os.read(self._terminal, 65536).decode()

    def end(self) -> int:
        """Its exit code, once it has ended and all it wrote is read."""
        with contextlib.suppress(OSError):  # which is how a terminal says that its end is closed
            while data := os.read(self._terminal, 65536):
                self.text += data.decode()
        os.close(self._terminal)
        return self.process.wait(WAIT_S)


def test_one_snapshot_as_json_and_as_a_picture(
    job: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    done = subprocess.run([*MONITOR, "--json"], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0 and done.stderr == ""
    (channel,) = json.loads(done.stdout)["server"]["channels"]
    assert (channel["name"], channel["depth"], channel["held_bytes"]) == ("samples", 3, 3)
    assert channel["rate_per_s"]["put_items"] == 0.0
    done = subprocess.run([*MONITOR, "--once"], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0 and "samples" in done.stdout and done.stderr == ""
    file = tmp_path / "picture.svg"
    assert main(["--interval", "0.1", "--svg", str(file)]) == 0
    assert "samples" in file.read_text() and str(job.pid) in file.read_text()


def test_the_connections_of_a_running_job_are_drawn_from_outside(
    job: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--graph"]) == 0
    text = capsys.readouterr().out
    assert f"channel/0  [cpu, pid {job.pid}]" in text and "registry/0" in text
    for name in ("graph.svg", "graph.dot"):
        assert main(["--graph", str(tmp_path / name)]) == 0
        assert "channel/0" in (tmp_path / name).read_text()
    ElementTree.parse(tmp_path / "graph.svg")
    with pytest.raises(SystemExit):
        main(["--graph", "graph.pdf"])
    assert "does not end in .text, .dot, .svg" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["ends", "is killed"])
def test_the_live_view_survives_the_end_of_the_job(job: subprocess.Popen[bytes], end: str) -> None:
    live = Live()
    live.until("samples")
    if end == "ends":
        job.communicate(b"\n", WAIT_S)
    else:
        job.kill()
        job.wait(WAIT_S)
    assert live.end() == 0, live.text
    assert "the job has ended" in live.text and "Traceback" not in live.text


def test_ctrl_c_ends_the_live_view_and_not_the_job(job: subprocess.Popen[bytes]) -> None:
    live = Live()
    live.until("samples")
    live.process.send_signal(signal.SIGINT)
    assert live.end() == 0, live.text
    assert "Traceback" not in live.text and job.poll() is None
