"""Ending a response where its text says so, though token ids are what is sampled."""

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["StopStrings"]

MAX_BYTES = 4
"""Of a character in UTF-8: a token may be a single byte of it."""
MARGIN = 4


class StopStrings:
    """Whether a response has just come to contain one of some strings.

    Args:
        strings: What to look for, none of them empty.
        decode: Text of token ids, special tokens included.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings, self._decode = strings, decode
        # Some tokens more: tokenizers treat the first one of a text in a way of its own.
        self._window = MAX_BYTES * max(map(len, strings)) + MARGIN

    def completed(self, ids: Any) -> bool:
        """Whether the last of the tokens `ids` [T] completes a string."""
        text = self._decode(ids[-self._window :].tolist())
        return any(string in text for string in self._strings)
