"""What rlinf-monitor costs the job it looks at: iterations of the tiny RLHF run, with and without.

The page is served and asked as a browser asks it. The monitor is stopped and let go on in turn, a
few seconds at a time, while one and the same job runs; a pair of neighbours is compared, and the
middle of all pairs counts. Both the job's loss and the processor time of the monitor are told.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import psutil
from overhead import Step, framework

sys.path.insert(0, str(Path(__file__).parent.parent / "apps" / "rlhf"))

from settings import RlhfConfig, SftConfig

from rlinf.workers import Cluster

BLOCK_S = 4.0
ASK_S = 0.5
"""How often the page asks."""


@contextlib.contextmanager
def watched() -> Iterator[psutil.Process]:
    """A monitor with a page that somebody looks at."""
    command = [sys.executable, "-m", "rlinf.channel.monitor", "--web", str(os.getpid())]
    ending = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()

        def read() -> None:
            seen = turn = 0
            while not ending.wait(ASK_S):
                with contextlib.suppress(OSError):
                    asked = f"{url}state.json?after={seen}&turn={turn}"
                    with urllib.request.urlopen(asked, timeout=10.0) as answer:
                        if answer.status == HTTPStatus.OK:
                            state = json.load(answer)
                            turn, spans = state["turn"], state.get("spans")
                            seen = spans[-1][0] if spans else seen

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGCONT)
            ending.set()
            reader.join()
            process.terminate()


def block(step: Step) -> float:
    """Seconds an iteration, over a few seconds."""
    begun = time.perf_counter()
    for count in range(1, 1_000_000):
        step()
        if (seconds := time.perf_counter() - begun) > BLOCK_S:
            return seconds / count
    raise AssertionError


def measure(quick: bool) -> dict[str, object]:
    """One table: the monitor's cost to the job, and its own."""
    config = RlhfConfig(sft=SftConfig(steps=100))
    pairs, used, seconds = [], 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder, Cluster(folder=Path(folder)) as cluster:
        step = framework(config, cluster)
        block(step)
        with watched() as monitor:
            block(step)
            for number in range(3 if quick else 12):
                times = {}
                for awake in (True, False) if number % 2 else (False, True):
                    monitor.resume() if awake else monitor.suspend()
                    before, begun = sum(monitor.cpu_times()[:2]), time.perf_counter()
                    times[awake] = block(step)
                    used += sum(monitor.cpu_times()[:2]) - before
                    seconds += (time.perf_counter() - begun) * awake
                pairs.append(times[True] / times[False] - 1.0)
    quarters = statistics.quantiles(pairs, n=4)
    rows = {
        "an iteration takes longer by, %": round(100 * statistics.median(pairs), 2),
        "middle half of the pairs, %": [round(100 * quarters[0], 2), round(100 * quarters[2], 2)],
        "pairs": len(pairs),
        "the monitor itself, % of a core": round(100 * used / seconds, 2),
    }
    print("\nrlinf-monitor --web on the rlhf job, a picture a second and a page that is open")
    for name, value in rows.items():
        print(f"  {name:40} {value}")
    return {"rlhf, tiny model, Ray": rows}
