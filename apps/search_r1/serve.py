"""The search engine of this app as a server, for `retriever=http://...` of this or other programs.

python apps/search_r1/serve.py                 # on 127.0.0.1:8000
python apps/search_r1/serve.py 0.0.0.0 9000
"""

import signal
import sys

from corpus import documents

from rlinf.workers.errors import ConfigError
from rlinf.workers.tools.bm25 import Bm25Index
from rlinf.workers.tools.search import CachedRetriever
from rlinf.workers.tools.search_server import SearchServer, ServerConfig

__all__ = ["main"]

REMEMBERED = 10_000


def main(host: str = "127.0.0.1", port: str = "8000") -> int:
    """Serve until SIGINT or SIGTERM."""
    try:
        articles = documents()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    retriever = CachedRetriever(Bm25Index(articles), REMEMBERED)
    pages = {article.url: article for article in articles}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with SearchServer(retriever, ServerConfig(host, int(port)), pages) as server:
            print(f"{len(articles)} documents at {server.url}", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        print(f"error: cannot listen on {host}:{port}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
