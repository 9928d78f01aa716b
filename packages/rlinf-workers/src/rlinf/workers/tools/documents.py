"""Documents, what a search found in them, and how it is shown to a model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Document", "Hit", "Retriever", "Shown", "shown", "snippet"]

_SENTENCE_END = re.compile(r"(?<=[a-z0-9)\]”\"]\.)\s+(?=[A-Z“\"])")
_WORD = re.compile(r"\w+")
_IDLE = {"a", "an", "and", "are", "at", "by", "does", "for", "from", "in", "is", "it", "of", "on"}
_IDLE |= {"or", "the", "to", "was", "were", "what", "which", "who"}


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name.

    Attributes:
        id: Unique in its corpus.
        title: May be empty.
        text: Without the title.
        url: Where it comes from; may be empty.
    """

    id: str
    title: str
    text: str
    url: str = ""

    @property
    def contents(self) -> str:
        """Title and text in one, as retrieval servers give them."""
        return f'"{self.title}"\n{self.text}' if self.title else self.text

    @classmethod
    def parse(cls, id: str, contents: str, url: str = "") -> "Document":
        """The inverse of `contents`, for any text."""
        first, newline, rest = contents.partition("\n")
        if newline and len(first) > 2 and first[0] == first[-1] == '"':
            return cls(id, first[1:-1], rest, url)
        return cls(id, "", contents, url)


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found, and how well it fits; the best has the highest score."""

    document: Document
    score: float


class Retriever(Protocol):
    """Finds documents. Called from several threads at once."""

    def retrieve(self, queries: Sequence[str], k: int, timeout_s: float) -> list[list[Hit]]:
        """At most `k` hits a query, the best first, queries in order. Raises `ToolFailed`."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What of a hit is shown.

    Attributes:
        words: Of each document, the sentences that fit the query best, so many words at most; 0:
            all of it.
    """

    words: int = 0


def shown(query: str, hits: Sequence[Hit], how: Shown) -> str:
    """Hits as text, one after the other."""
    if not hits:
        return "nothing was found"
    texts = []
    for number, hit in enumerate(hits, 1):
        document = hit.document
        text = snippet(query, document, how.words) if how.words else document.text
        texts.append(f"Doc {number}(Title: {document.title}) {text}")
    return "\n".join(texts)


def snippet(query: str, document: Document, words: int) -> str:
    """The part of a document that fits the query best: whole sentences, at most `words` words.

    It begins with the sentence that has most words of the query which the title does not have, the
    first of equals. One that is too long is cut.
    """
    sentences = _SENTENCE_END.split(" ".join(document.text.split()))
    asked = _words(query) - _IDLE
    wanted = asked - _words(document.title) or asked
    fits = [len(wanted & _words(sentence)) for sentence in sentences]
    best = fits.index(max(fits))
    chosen = sentences[best].split()[:words]
    for sentence in sentences[best + 1 :]:
        more = sentence.split()
        if len(chosen) + len(more) > words:
            break
        chosen += more
    return " ".join(chosen)


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}
