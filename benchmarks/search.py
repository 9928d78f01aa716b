"""Episodes with a search tool: how many a second, and how long does the engine stand idle?

Every contestant does the same: 32 episodes of three turns with 32 tokens each, a search after the
first and the second, 64 tokens of what was found appended; a model of 1 M parameters with random
weights; BM25 (bm25s) over 10,000 made-up documents.

- cache kept: a plain loop over a transformers module; the batch goes in step, all searches of a
  turn at once, keys and values stay.
- read again: the same, but every turn reads everything before it again.
- one by one: this engine and model, one episode after the other.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from harness import race, ratio, show
from torch import Tensor, nn
from transformers import DynamicCache

from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.engines.torch_episodes import EpisodeConfig, TorchEpisodes
from rlinf.workers.episodes.codec import TextCodec
from rlinf.workers.episodes.episode import Episode, EpisodeLimits, Language
from rlinf.workers.episodes.turn_format import Action, Answer, Call, TurnFormat
from rlinf.workers.roles import GenerationRequest, Sampling, Tool
from rlinf.workers.tools.bm25 import Bm25Index
from rlinf.workers.tools.box import ToolBox
from rlinf.workers.tools.documents import Document
from rlinf.workers.tools.search import SearchConfig, SearchTool
from rlinf.workers.tools.search_server import SearchServer

EPISODES, TURNS, TURN_TOKENS, SHOWN_TOKENS, PROMPT_TOKENS = 32, 3, 32, 64, 16
QUERY_TOKENS = 6
LATENCY_S = 0.1
WORDS = 5000
LIMITS = EpisodeLimits(calls=TURNS, observation_tokens=SHOWN_TOKENS, tokens=512)
QUERIES = 2000


@dataclass(frozen=True)
class Setting:
    """What all contestants share."""

    model: nn.Module
    codec: TextCodec
    language: Language
    tool: Tool
    requests: Sequence[GenerationRequest]


class Late:
    """A tool that is so much later."""

    def __init__(self, tool: Tool, latency_s: float) -> None:
        self._tool, self._latency_s = tool, latency_s

    def call(self, arguments: Sequence[str], timeout_s: float) -> list[str]:
        """See `Tool`."""
        time.sleep(self._latency_s)
        return self._tool.call(arguments, timeout_s)


class FixedTurns(Episode):
    """Its turns end by their length: random weights close no tag."""

    def _read(self, token: int) -> Action | None:
        if len(self.turn) < TURN_TOKENS:
            return None
        text = self._language.codec.decode(self.turn[-QUERY_TOKENS:])
        return Answer(text) if self.calls == TURNS - 1 else Call("search", text or "w1")


class Engine(TorchEpisodes):
    """The engine with such episodes."""

    def _episodes(self, requests: Sequence[GenerationRequest]) -> list[Episode]:
        return [
            FixedTurns(request, 0, self._version, self._limits, self._language)
            for request in requests
        ]


def measure(quick: bool) -> dict[str, object]:
    """All questions."""
    torch.set_num_threads(min(2, torch.get_num_threads()))
    setting = _setting()
    rounds = 3 if quick else 15
    samples = race(
        {
            "this engine": lambda: _ours(setting, setting.tool),
            "plain loop, cache kept": lambda: _plain(setting, setting.tool, keep=True),
            "plain loop, read again": lambda: _plain(setting, setting.tool, keep=False),
        },
        rounds,
        patience_s=60.0,
    )
    title = f"{EPISODES} episodes, tool latency 0"
    at_once = show(title, samples, "plain loop, cache kept", each=EPISODES)
    late = Late(setting.tool, LATENCY_S)
    slow = race(
        {
            "this engine": lambda: _ours(setting, late),
            "plain loop, cache kept": lambda: _plain(setting, late, keep=True),
            "one by one": lambda: _one_by_one(setting, late),
        },
        3,
        warmup=1,
        patience_s=60.0,
    )
    title = f"{EPISODES} episodes, tool latency {LATENCY_S * 1e3:.0f} ms"
    in_time = show(title, slow, "one by one", each=EPISODES)
    idle = {name: _idle(setting, tool) for name, tool in (("0", setting.tool), ("100 ms", late))}
    print("\nshare of time in which the engine stands idle: " + str(idle))
    return {
        "latency 0": at_once,
        "speed-up over the plain loop": round(
            1 / ratio(samples, "this engine", "plain loop, cache kept"), 2
        ),
        "latency 100 ms": in_time,
        "speed-up over one by one": round(1 / ratio(slow, "this engine", "one by one"), 2),
        "idle share": idle,
        "server queries/s": _server_rate(setting),
    }


def _setting() -> Setting:
    rng = random.Random(0)
    words = [f"w{i}" for i in range(WORDS)]
    documents = [
        Document(str(i), " ".join(rng.choices(words, k=2)), " ".join(rng.choices(words, k=77)))
        for i in range(10_000)
    ]
    turns = TurnFormat(["search"])
    texts = [document.text for document in documents[:500]]
    codec = TextCodec.trained(texts, 2048, ["<pad>", *turns.tags])
    spec = ModelSpec(vocab_size=codec.size, hidden_size=128, layers=4, max_positions=512)
    requests = [
        GenerationRequest(
            uid=f"r{i}",
            prompt_ids=np.array(codec.encode(documents[i].text)[:PROMPT_TOKENS], np.int32),
            max_new_tokens=TURNS * TURN_TOKENS,
            sampling=Sampling(banned_ids=tuple(range(1 + len(turns.tags)))),
        )
        for i in range(EPISODES)
    ]
    # Without a cache: every round searches.
    tool = SearchTool(Bm25Index(documents), SearchConfig(top_k=3, cache=0))
    return Setting(build_model(spec), codec, Language(codec, turns), tool, requests)


def _ours(setting: Setting, tool: Tool) -> float:
    """Roll all episodes out; the seconds that the engine stood idle."""
    with ToolBox({"search": tool}) as box:
        engine = Engine(setting.model, EpisodeConfig(LIMITS), setting.language, box)
        groups = list(engine.generate(setting.requests))
        assert sum(g.token_count for g in groups) == EPISODES * TURNS * TURN_TOKENS
        return engine.idle_s


def _one_by_one(setting: Setting, tool: Tool) -> None:
    with ToolBox({"search": tool}) as box:
        engine = Engine(setting.model, EpisodeConfig(LIMITS), setting.language, box)
        for request in setting.requests:
            list(engine.generate([request]))


def _idle(setting: Setting, tool: Tool) -> float:
    shares = []
    for _ in range(5):
        start = time.perf_counter()
        idle = _ours(setting, tool)
        shares.append(idle / (time.perf_counter() - start))
    return round(statistics.median(shares), 3)


@torch.inference_mode()
def _plain(setting: Setting, tool: Tool, *, keep: bool) -> Tensor:
    """The batch in step, on the transformers module."""
    codec, banned = setting.codec, list(setting.requests[0].sampling.banned_ids)
    record = torch.tensor(np.stack([r.prompt_ids for r in setting.requests]), dtype=torch.int64)
    cache, fresh = DynamicCache(), record
    for turn in range(TURNS):
        if not keep:
            cache, fresh = DynamicCache(), record
        drawn = []
        for _ in range(TURN_TOKENS):
            output = setting.model(input_ids=fresh, past_key_values=cache, use_cache=True)
            logits = output.logits[:, -1].float()
            logits[:, banned] = -torch.inf
            fresh = torch.multinomial(logits.softmax(-1), 1)
            drawn.append(fresh)
        record = torch.cat([record, *drawn], 1)
        if turn < TURNS - 1:
            queries = [codec.decode(row[-QUERY_TOKENS:].tolist()) or "w1" for row in record]
            texts = tool.call(queries, 10.0)
            found = [list(setting.language.observation(t, SHOWN_TOKENS)) for t in texts]
            # In step all rows are as long as the longest: a short observation is filled up.
            filled = [(ids * SHOWN_TOKENS)[:SHOWN_TOKENS] for ids in found]
            shown = torch.tensor(filled)
            record = torch.cat([record, shown], 1)
            fresh = torch.cat([fresh, shown], 1)
    return record


def _server_rate(setting: Setting) -> float:
    """Queries a second that the HTTP server answers to a client with one query a request."""
    from rlinf.workers.tools.http_search import HttpRetriever

    assert isinstance(setting.tool, SearchTool)
    queries = [f"w{i % WORDS} w{7 * i % WORDS}" for i in range(QUERIES)]
    with SearchServer(setting.tool.retriever) as server:
        client = HttpRetriever(server.url)
        rate = _rate(lambda query: client.retrieve([query], 3, 10.0), queries)
    print(f"server: {rate:,.0f} queries/s, one a request, from one process with 4 threads")
    return round(rate)


def _rate(ask: Callable[[str], object], queries: Sequence[str]) -> float:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as threads:
        start = time.perf_counter()
        list(threads.map(ask, queries))
        return len(queries) / (time.perf_counter() - start)
