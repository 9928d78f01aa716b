"""Mathematical equality of an answer and the right one, by math-verify and sympy, made strict.

Run it in a `JudgePool`: some answers take minutes or gigabytes, and math-verify evaluates text.

The rules, beyond those of math-verify 0.9:
- The answer is what the last `\\boxed{...}` of the response holds (or what `read` finds); only that
  is compared, as a whole. A response without one is a format error, as is an answer that cannot be
  parsed: nothing is picked out of prose.
- Numbers are equal when they agree to six places after the point, as math-verify has it, and differ
  by no more than 1e-5 of the larger: by places alone all tiny numbers are equal.
- A percentage is its fraction: 50% is 0.5.
- Sets are equal in any order, tuples and intervals are not; an open end is not a closed one.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlinf.workers.engines.rule_reward import FORMAT_ERROR, Judge
from rlinf.workers.roles.reward import Score

__all__ = ["equal", "judge_math", "make_math_judge", "read_boxed"]

TOLERANCE = 1e-5
DIGITS = 40
_POINTS = (0.7390851332, 1.3247179572, 2.2360679775)
"""Where two expressions with symbols are compared besides sympy's own verdict."""


def read_boxed(response: str) -> str | None:
    """What the last `\\boxed{...}` holds, with its braces balanced; None without one."""
    start = response.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for place in range(begin, len(response)):
        depth += {"{": 1, "}": -1}.get(response[place], 0)
        if not depth:
            return response[begin:place].strip() or None
    return None


def judge_math(answers: Mapping[int, str], read: Callable[[str], str | None] = read_boxed) -> Judge:
    """A judge that compares what `read` finds in a response with an item's right answer.

    An item whose right answer cannot be parsed is `unscored`: the data is wrong, not the response.
    """
    import math_verify  # noqa: F401 - missing, it fails here and not at the first answer

    def judge(response: str, item: int) -> Score:
        answer = read(response)
        if answer is None:
            return FORMAT_ERROR
        gold = _parsed(answers[item])
        if gold is None:
            return Score(0.0, "unscored")
        given = _parsed(answer)
        return FORMAT_ERROR if given is None else Score(float(_same(gold, given)))

    return judge


def make_math_judge(answers: Mapping[int, str]) -> Callable[[], Judge]:
    """What a `JudgePool` takes: picklable."""
    return partial(judge_math, dict(answers))


def equal(gold: str, answer: str) -> bool:
    """Whether two answers are the same; False where either cannot be parsed."""
    first, second = _parsed(gold), _parsed(answer)
    return first is not None and second is not None and _same(first, second)


def _parsed(text: str) -> Any:
    """The whole of `text` as one sympy object, or None."""
    from math_verify import LatexExtractionConfig, parse

    bare = text.strip().strip("*").strip().strip("$").strip().rstrip(".")
    bare = re.sub(r"^\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}$", r"\1", bare)
    bare = re.sub(r"\s*(?:°|\^\\circ|\^\{\\circ\})$", "", bare)
    bare = re.sub(r"(?<=\d)(\{,\}|,(?=\d{3}(?!\d)))", "", bare) if _is_grouped(bare) else bare
    found = parse(
        f"${bare}$",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return found[0] if found else None


def _is_grouped(text: str) -> bool:
    """Whether it is one number whose digits are in groups of three."""
    return re.fullmatch(r"[-+]?\d{1,3}(?:(?:\{,\}|,)\d{3})+(?:\.\d+)?", text) is not None


def _same(gold: Any, answer: Any) -> bool:
    from math_verify import verify

    agreed = verify(gold, answer, timeout_seconds=None)
    return bool(agreed) and _close(gold, answer)


def _close(gold: Any, answer: Any) -> bool:
    """Whether what math-verify took for equal is so at any size."""
    from sympy import Expr, FiniteSet, Interval, MatrixBase, Tuple

    gold, answer = _value(gold), _value(answer)
    if isinstance(gold, FiniteSet) and isinstance(answer, FiniteSet):
        return len(gold) == len(answer) and all(
            any(_close(one, other) for other in answer) for one in gold
        )
    if isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase):
        return _all_close(list(gold), list(answer))
    if isinstance(gold, (Interval, Tuple)) and isinstance(answer, (Interval, Tuple)):
        return _all_close(list(gold.args[:2]), list(answer.args[:2]))
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        return _close_numbers(gold, answer)
    return True


def _all_close(gold: list[Any], answer: list[Any]) -> bool:
    return len(gold) == len(answer) and all(map(_close, gold, answer))


def _value(expression: Any) -> Any:
    """5 for `x = 5`."""
    from sympy import Eq, Symbol

    named = isinstance(expression, Eq) and isinstance(expression.lhs, Symbol)
    return expression.rhs if named else expression


def _close_numbers(gold: Any, answer: Any) -> bool:
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    for point in _POINTS if symbols else (0.0,):
        places = {symbol: point + i for i, symbol in enumerate(symbols)}
        one, other = (side.subs(places).doit().evalf(DIGITS) for side in (gold, answer))
        if not (one.is_number and other.is_number and one.is_finite and other.is_finite):
            return True  # infinities and the like: math-verify's word stands
        if abs(one - other) > TOLERANCE * max(abs(one), abs(other)):
            return False
    return True
