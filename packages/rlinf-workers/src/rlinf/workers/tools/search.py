"""The search tool: a retriever behind a cache, its hits shown as text."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.workers.bounds import Count, Natural
from rlinf.workers.tools.documents import Hit, Retriever, Shown, shown

__all__ = ["CachedRetriever", "SearchConfig", "SearchTool"]


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """What a search shows.

    Attributes:
        top_k: Documents a query, at most.
        words: Of each, the sentences that fit the query best, so many words at most; 0: all of it.
        cache: Queries whose hits are remembered.
    """

    top_k: Count = 3
    words: Natural = 0
    cache: Natural = 10_000


class CachedRetriever:
    """A `Retriever` that asks another one only for what it does not remember. Thread-safe.

    Queries are the same when they differ in case and white space only. What was asked for longest
    ago is forgotten first; failures are not remembered.
    """

    def __init__(self, inner: Retriever, size: int) -> None:
        self._inner, self._size = inner, size
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], list[Hit]] = OrderedDict()
        self.hits = self.misses = 0

    def retrieve(self, queries: Sequence[str], k: int, timeout_s: float) -> list[list[Hit]]:
        """See `Retriever`."""
        keys = [(" ".join(query.lower().split()), k) for query in queries]
        with self._lock:
            known = {key: self._kept[key] for key in keys if key in self._kept}
            for key in known:
                self._kept.move_to_end(key)
            missing = list(dict.fromkeys(key for key in keys if key not in known))
            self.hits += len(keys) - len(missing)
            self.misses += len(missing)
        if missing:
            found = self._inner.retrieve([query for query, _ in missing], k, timeout_s)
            known |= dict(zip(missing, found, strict=True))
            with self._lock:
                self._kept.update((key, known[key]) for key in missing)
                while len(self._kept) > self._size:
                    self._kept.popitem(last=False)
        return [known[key] for key in keys]


class SearchTool:
    """A `Tool` whose argument is a query."""

    def __init__(self, retriever: Retriever, config: SearchConfig | None = None) -> None:
        self._config = config or SearchConfig()
        size = self._config.cache
        self.retriever = CachedRetriever(retriever, size) if size else retriever

    def call(self, arguments: Sequence[str], timeout_s: float) -> list[str]:
        """See `Tool`."""
        hits = self.retriever.retrieve(arguments, self._config.top_k, timeout_s)
        how = Shown(self._config.words)
        return [shown(query, found, how) for query, found in zip(arguments, hits, strict=True)]
