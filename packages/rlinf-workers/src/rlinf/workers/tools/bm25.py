"""A search engine in this process: BM25 over an index in memory. Needs the extra `search`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlinf.workers.tools.documents import Document, Hit

__all__ = ["Bm25Index"]


class Bm25Index:
    """A `Retriever` over `documents`. Read-only once made, so that threads may share it.

    Args:
        documents: At least one.
        title_weight: A word of the title counts as so many of the text.
    """

    def __init__(self, documents: Sequence[Document], title_weight: int = 5) -> None:
        import bm25s

        if not documents:
            raise ValueError("an index needs at least one document")
        self.documents = tuple(documents)
        self._engine: Any = bm25s.BM25()
        texts = [f"{f'{d.title} ' * title_weight}{d.text}" for d in documents]
        self._engine.index(_tokens(texts), show_progress=False)

    def retrieve(self, queries: Sequence[str], k: int, timeout_s: float = 0.0) -> list[list[Hit]]:
        """See `Retriever`; documents that share no word with the query are no hits."""
        if not queries:
            return []
        size = min(k, len(self.documents))
        tokens = _tokens(list(queries))
        found, scores = self._engine.retrieve(tokens, k=size, show_progress=False)
        return [
            [
                Hit(self.documents[i], float(score))
                for i, score in zip(row.tolist(), points.tolist(), strict=True)
                if score > 0
            ]
            for row, points in zip(np.asarray(found), np.asarray(scores), strict=True)
        ]


def _tokens(texts: list[str]) -> Any:
    import bm25s

    return bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
