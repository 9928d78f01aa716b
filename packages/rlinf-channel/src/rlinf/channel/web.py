"""The monitor as a page in a browser: served on loopback, behind a token in its address.

    /TOKEN/            the page, and the files it is made of
    /TOKEN/state.json  what the page shows; `?after=N`: of the spans only those above that number;
                       `&turn=N`: nothing (204) as long as nobody has looked again
    /TOKEN/metrics     the same for Prometheus

One thread looks at the job, another at the connections; requests are answered from what they saw
last, so however many browsers look, the job is asked once.
"""

import contextlib
import functools
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
from typing import Protocol
from urllib.parse import parse_qsl, urlsplit

from rlinf.channel.curves import Curves
from rlinf.channel.exposition import exposition
from rlinf.channel.findings import findings
from rlinf.channel.snapshot import Snapshot, as_json
from rlinf.comm.errors import CommError
from rlinf.debug.drawing import visualize_connection_graph
from rlinf.debug.graph import ConnectionGraph

LOOPBACK = "127.0.0.1"
CONNECTIONS_S = 5.0
FILES = {
    "": ("index.html", "text/html"),
    "style.css": ("style.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "draw.js": ("draw.js", "text/javascript"),
}
"""Path below the token -> file of the page, and what it is."""

Answer = tuple[str, Callable[..., bytes | None]]
"""What it is, and what makes it, given the numbers that the query says; None: nothing is new."""


class Looker(Protocol):
    """Who looks at the job; `rlinf.channel.monitor.Observer` is one."""

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer."""

    def look(self, patience_s: float) -> Snapshot | None:
        """A new snapshot; None if the job has not answered yet."""

    def connections(self) -> ConnectionGraph:
        """Who is connected to whom, over what and why."""


class View:
    """What was seen last. Threads write it, requests read it.

    Args:
        looker: Who looks.
        title: Of the job.
        run: The folder of the job's run, for its curves; None: what the job says.

    Attributes:
        turn: Counts how often somebody looked.
        ended: How the job ended; empty while it runs.
    """

    def __init__(self, looker: Looker, title: str, run: Path | None = None) -> None:
        self._looker, self._title, self._run = looker, title, run
        self._before: Snapshot | None = None
        self._last: Snapshot | None = None
        self._connected: dict[str, object] = {"connections": [], "graph": ""}
        self._curves: tuple[Path, Curves] | None = None
        self._lock = threading.Lock()
        self.turn = 1
        self.ended = ""

    def watch(self, interval_s: float, stop: threading.Event, gone: type[Exception]) -> None:
        """Look every `interval_s` until `stop` is set or the job is gone, which `gone` says."""
        while not stop.is_set():
            started = time.monotonic()
            try:
                snapshot = self._looker.look(interval_s)
            except gone as error:
                self.ended = str(error)
                self.turn += 1
                return
            if snapshot is not None:
                self._before, self._last = self._last, snapshot
            self.turn += 1
            stop.wait(max(0.0, started + interval_s - time.monotonic()))

    def watch_connections(self, stop: threading.Event) -> None:
        """Ask who is connected to whom, every few seconds."""
        while not stop.is_set() and not self.ended:
            with contextlib.suppress(CommError):  # the page shows those of before
                graph = self._looker.connections()
                drawn = visualize_connection_graph(graph, "svg")
                self._connected = {"connections": connection_rows(graph), "graph": drawn}
            stop.wait(CONNECTIONS_S)

    def state(self, after: int = 0) -> dict[str, object]:
        """What the page shows."""
        last = self._last
        seen = {} if last is None else as_json(last, self._before, after)
        return seen | {
            "turn": self.turn,
            "job": self._title,
            "ended": self.ended,
            "silent_s": self._looker.silent_s,
            "findings": [] if last is None else [asdict(one) for one in findings(last)],
            **self._connected,
            "curves": self._read_curves(),
        }

    def _read_curves(self) -> dict[str, list[list[float]]]:
        run = self._run
        if run is None and self._last is not None and self._last.life is not None:
            run = Path(self._last.life.run) if self._last.life.run else None
        if run is None:
            return {}
        with self._lock:
            if self._curves is None or self._curves[0] != run:
                self._curves = run, Curves(run / "metrics.jsonl")
            return self._curves[1].read()

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
        answers: dict[str, Answer] = {
            "state.json": ("application/json", functools.partial(_state, view)),
            "metrics": ("text/plain; version=0.0.4", lambda **_: view.metrics().encode()),
        }
        for name, (file, kind) in FILES.items():
            content = files("rlinf.channel").joinpath("page", file).read_bytes()
            answers[name] = (f"{kind}; charset=utf-8", functools.partial(_static, content))
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


def connection_rows(graph: ConnectionGraph) -> list[dict[str, object]]:
    """The connections of a `rlinf.debug.ConnectionGraph` as JSON has them; silent workers last."""
    rows: list[dict[str, object]] = [
        asdict(one) | {"one": str(one.one), "other": str(one.other)} for one in graph.connections
    ]
    return rows + [{"one": str(id), "state": "silent", "because": why} for id, why in graph.silent]


def _static(content: bytes, **_: int) -> bytes:
    return content


def _state(view: View, after: int = 0, turn: int = 0, **_: int) -> bytes | None:
    if turn == view.turn:
        return None
    return json.dumps(view.state(after), separators=(",", ":")).encode()


def _handler(token: str, answers: Mapping[str, Answer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            given, _, what = address.path.removeprefix("/").partition("/")
            if not secrets.compare_digest(given.encode(), token.encode()) or what not in answers:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            asked = {key: int(n) for key, n in parse_qsl(address.query) if n.isdecimal()}
            kind, make = answers[what]
            body = make(**asked)
            if body is None:
                self.send_response(HTTPStatus.NO_CONTENT)
                self.end_headers()
                return
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
