"""Serves a retriever over HTTP: the other side of `http_search`, whose module has the protocol.

    with SearchServer(Bm25Index(documents)) as server:
        print(server.url)

Also GET /health, 200 with the number of requests so far. What is not understood is answered with
400 and `{"error": text}`.
"""

import json
import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from rlinf.workers.bounds import Count, Natural, Positive
from rlinf.workers.roles.tool import ToolFailed
from rlinf.workers.tools.documents import Document, Hit, Retriever

__all__ = ["SearchServer", "ServerConfig"]

log = logging.getLogger(__name__)

LARGEST_REQUEST_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where the server listens and what it gives.

    Attributes:
        host: Address of an interface.
        port: 0: any free one.
        top_k: Documents a query where the client does not say.
        most: Documents a query, whatever it says.
        deadline_s: For one request, and for a connection to say something.
    """

    host: str = "127.0.0.1"
    port: Natural = 0
    top_k: Count = 3
    most: Count = 100
    deadline_s: Positive = 30.0


class SearchServer:
    """Serves from threads of its own from construction until `close`.

    Args:
        retriever: Asked from several threads.
        config: See `ServerConfig`.
        pages: Documents by url, for /access.

    Raises:
        OSError: The port is taken.
    """

    def __init__(
        self,
        retriever: Retriever,
        config: ServerConfig | None = None,
        pages: Mapping[str, Document] | None = None,
    ) -> None:
        self._retriever, self._config = retriever, config or ServerConfig()
        self._pages = pages or {}
        owner = self

        class Handler(_Handler):
            server_of = owner
            timeout = owner._config.deadline_s

        self._server = _Listener((self._config.host, self._config.port), Handler)
        self.requests = 0
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="rlinf-search", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where it is reached."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """The answer to a request, as JSON has it. Raises `ValueError` where it has no sense."""
        self.requests += 1
        tree = json.loads(body)
        if not isinstance(tree, dict):
            raise ValueError("the body must be an object")
        if path == "/retrieve":
            return {"result": self._retrieve(tree)}
        if path == "/access":
            return {"result": [self._page(url) for url in _texts(tree, "urls")]}
        raise KeyError(path)

    def _retrieve(self, tree: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
        k = tree.get("topk")
        k = self._config.top_k if k is None else k
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ValueError("topk must be a number above 0, or null")
        found = self._retriever.retrieve(
            _texts(tree, "queries"), min(k, self._config.most), self._config.deadline_s
        )
        form = _with_score if tree.get("return_scores") else _plain
        return [[form(hit) for hit in hits] for hits in found]

    def _page(self, url: str) -> dict[str, Any] | None:
        document = self._pages.get(url)
        return None if document is None else _entry(document)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("the connection of %s ended", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server_of: SearchServer

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, {"requests": self.server_of.requests})
        else:
            self._reply(404, {"error": f"there is no {self.path}"})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > LARGEST_REQUEST_BYTES:
            self.close_connection = True
            self._reply(400, {"error": f"a length up to {LARGEST_REQUEST_BYTES} is needed"})
            return
        body = self.rfile.read(int(length))
        try:
            self._reply(200, self.server_of.answer(self.path, body))
        except KeyError:
            self._reply(404, {"error": "there is /retrieve and /access"})
        except ValueError as error:
            self._reply(400, {"error": str(error)})
        except ToolFailed as error:
            self._reply(503, {"error": error.message})

    def _reply(self, status: int, tree: Mapping[str, Any]) -> None:
        body = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _texts(tree: Mapping[str, Any], key: str) -> Sequence[str]:
    values = tree.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"`{key}` must be a list of strings")
    return values


def _entry(document: Document) -> dict[str, Any]:
    entry = {"id": document.id, "contents": document.contents}
    return entry | {"url": document.url} if document.url else entry


def _plain(hit: Hit) -> dict[str, Any]:
    return _entry(hit.document)


def _with_score(hit: Hit) -> dict[str, Any]:
    return {"document": _entry(hit.document), "score": hit.score}
