"""The monitor as a page in a browser: one file, served on loopback, behind a token in its address.

    /TOKEN/            the page
    /TOKEN/state.json  what the page shows
    /TOKEN/metrics     the same for Prometheus

One thread looks at the job, another at the connections; requests are answered from what they saw
last, so however many browsers look, the job is asked once.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rlinf.channel.exposition import exposition
from rlinf.channel.snapshot import Snapshot, as_json

LOOPBACK = "127.0.0.1"
CURVES = ("reward", "eval_reward", "loss", "grad_norm", "staleness", "seconds")
"""What is drawn of a run's metrics, where it has them."""
POINTS = 500
"""A curve of more steps is thinned out to so many points."""
STEP_BYTES = 8 << 20
"""So much of the end of a metrics file is read."""
CONNECTIONS_S = 5.0


class Looker(Protocol):
    """Who looks at the job; `rlinf.channel.monitor.Observer` is one."""

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer."""

    def look(self, patience_s: float) -> Snapshot | None:
        """A new snapshot; None if the job has not answered yet."""

    def connections(self) -> list[dict[str, object]]:
        """Who is connected to whom, over what and why."""


class View:
    """What was seen last. Threads write it, requests read it.

    Args:
        looker: Who looks.
        title: Of the job.
        run: The folder of the job's run, for its curves; None: not known.
    """

    def __init__(self, looker: Looker, title: str, run: Path | None = None) -> None:
        self._looker, self._title, self._run = looker, title, run
        self._before: Snapshot | None = None
        self._last: Snapshot | None = None
        self._connections: list[dict[str, object]] = []
        self.ended = ""

    def watch(self, interval_s: float, stop: threading.Event, gone: type[Exception]) -> None:
        """Look every `interval_s` until `stop` is set or the job is gone, which `gone` says."""
        while not stop.is_set():
            started = time.monotonic()
            try:
                snapshot = self._looker.look(interval_s)
            except gone as error:
                self.ended = str(error)
                return
            if snapshot is not None:
                self._before, self._last = self._last, snapshot
            stop.wait(max(0.0, started + interval_s - time.monotonic()))

    def watch_connections(self, stop: threading.Event) -> None:
        """Ask who is connected to whom, every few seconds."""
        while not stop.is_set() and not self.ended:
            self._connections = self._looker.connections()
            stop.wait(CONNECTIONS_S)

    def state(self) -> dict[str, object]:
        """What the page shows."""
        seen = {} if self._last is None else as_json(self._last, self._before)
        return seen | {
            "job": self._title,
            "ended": self.ended,
            "silent_s": self._looker.silent_s,
            "connections": self._connections,
            "curves": {} if self._run is None else curves(self._run / "metrics.jsonl"),
        }

    def metrics(self) -> str:
        """The last snapshot for Prometheus; empty before the first, and once the job has ended."""
        return "" if self._last is None or self.ended else exposition(self._last)


class Page:
    """Serves a view on loopback. A context manager.

    Args:
        view: What is shown.
        port: 0: one that is free.
        token: What the address holds; a new one by default.

    Raises:
        OSError: The port is taken.
    """

    def __init__(self, view: View, port: int = 0, token: str = "") -> None:
        self._token = token or secrets.token_urlsafe(18)
        page = files("rlinf.channel").joinpath("page.html").read_bytes()
        answers: Mapping[str, tuple[str, Callable[[], bytes]]] = {
            "": ("text/html; charset=utf-8", lambda: page),
            "state.json": ("application/json", lambda: json.dumps(view.state()).encode()),
            "metrics": ("text/plain; version=0.0.4", lambda: view.metrics().encode()),
        }
        self._server = ThreadingHTTPServer((LOOPBACK, port), _handler(self._token, answers))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """What to open."""
        return f"http://{LOOPBACK}:{self._server.server_port}/{self._token}/"

    def __enter__(self) -> "Page":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def curves(path: Path) -> dict[str, list[list[float]]]:
    """Name -> [step, value] of each step in a run's metrics; {} where there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - STEP_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    found: dict[str, list[list[float]]] = {}
    for line in lines:
        try:
            step: dict[str, Any] = json.loads(line)
        except ValueError:  # its beginning was cut off, or its end is being written
            continue
        for name in CURVES:
            if isinstance(value := step.get(name), int | float):
                found.setdefault(name, []).append([step["step"], value])
    return {name: points[:: -(-len(points) // POINTS)] for name, points in found.items()}


def connection_rows(graph: Any) -> list[dict[str, object]]:
    """The connections of a `rlinf.debug.ConnectionGraph` as JSON has them; silent workers last."""
    rows: list[dict[str, object]] = [
        asdict(one) | {"one": str(one.one), "other": str(one.other)} for one in graph.connections
    ]
    return rows + [{"one": str(id), "state": "silent", "because": why} for id, why in graph.silent]


def _handler(
    token: str, answers: Mapping[str, tuple[str, Callable[[], bytes]]]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given, _, what = self.path.removeprefix("/").partition("?")[0].partition("/")
            if not secrets.compare_digest(given.encode(), token.encode()) or what not in answers:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            kind, make = answers[what]
            body = make()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the token is in the address."""

    return Handler
