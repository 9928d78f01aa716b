"""A retriever on another machine, over HTTP; the protocol of the retrieval servers of Search-R1.

    POST /retrieve  {"queries": [str], "topk": int | null, "return_scores": bool}
    200             {"result": [[{"document": {"id", "contents", ...}, "score": float}, ...], ...]}
                    or, without scores, {"result": [[{"id", "contents", "url"?}, ...], ...]}
    POST /access    {"urls": [str]}
    200             {"result": [{"contents": str, ...} | null, ...]}

`result` has an entry for each query or url, in order. Both forms are read whatever was asked for.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlinf.workers.http_post import FAILURES, RETRIED, Refused, post
from rlinf.workers.roles.tool import ToolFailed
from rlinf.workers.tools.documents import Document, Hit

__all__ = ["HttpRetriever"]


@dataclass(frozen=True, slots=True)
class HttpRetriever:
    """A `Retriever` that asks a server.

    Attributes:
        url: Of the server: `http://host:port`, with or without `/retrieve` at its end.
        return_scores: Which of the two forms is asked for.
    """

    url: str
    return_scores: bool = True

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"{self.url}: the url must begin with http:// or https://")

    def retrieve(self, queries: Sequence[str], k: int, timeout_s: float) -> list[list[Hit]]:
        """See `Retriever`. Nothing is sent where there is no query."""
        if not queries:
            return []
        body = {"queries": list(queries), "topk": k, "return_scores": self.return_scores}
        result = self._ask("retrieve", body, len(queries), timeout_s)
        return [[_hit(entry) for entry in _listed(found)][:k] for found in result]

    def access(self, urls: Sequence[str], timeout_s: float) -> list[Document | None]:
        """The documents at these urls, in order; None for one that the server does not have.

        Raises `ToolFailed`.
        """
        if not urls:
            return []
        result = self._ask("access", {"urls": list(urls)}, len(urls), timeout_s)
        return [None if e is None else _document(e) for e in result]

    def _ask(self, path: str, body: object, count: int, timeout_s: float) -> list[Any]:
        base = self.url.rstrip("/").removesuffix("/retrieve")
        try:
            answer = post(f"{base}/{path}", json.dumps(body).encode(), timeout_s)
        except Refused as error:
            text = f"the server answered with {error}"
            raise ToolFailed(text, final=error.status not in RETRIED) from error
        except FAILURES as error:
            raise ToolFailed(
                f"the server was not reached: {error or type(error).__name__}"
            ) from error
        try:
            tree = json.loads(answer)
        except ValueError as error:
            raise ToolFailed("the server's answer is not JSON") from error
        result = tree.get("result") if isinstance(tree, dict) else None
        if not isinstance(result, list) or len(result) != count:
            raise ToolFailed(f"the server's answer has no list `result` of {count}")
        return result


def _listed(found: object) -> list[Any]:
    if not isinstance(found, list):
        raise ToolFailed("the server's answer has something else than a list for a query")
    return found


def _hit(entry: object) -> Hit:
    """One entry of either form."""
    if isinstance(entry, dict) and isinstance(entry.get("document"), dict):
        score = entry.get("score")
        known = isinstance(score, int | float) and not isinstance(score, bool)
        return Hit(_document(entry["document"]), float(score) if known else 0.0)  # type: ignore[arg-type]
    return Hit(_document(entry), 0.0)


def _document(entry: object) -> Document:
    contents = entry.get("contents") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(contents, str):
        raise ToolFailed("the server's answer has a document without `contents`")
    return Document.parse(str(entry.get("id", "")), contents, str(entry.get("url") or ""))
