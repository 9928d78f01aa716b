"""A `RolloutEngine` over SGLang: samples, weights, sleep."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from rlinf.workers.engines.models import ModelSpec
from rlinf.workers.engines.sglang.config import SglangConfig
from rlinf.workers.engines.sglang.servers import EngineServer, HttpServer, Named, Server
from rlinf.workers.engines.sglang.wire import asks_of, check_done, group_of, spoken
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.rollout import GenerationRequest, Group

__all__ = ["SglangGenerate", "make"]

TAGS = ["kv_cache", "weights"]


def make(model: ModelSpec, config: Any) -> "SglangGenerate":
    """The engine: of the server that `config.sglang` names, or of one started here."""
    settings: SglangConfig = config.sglang
    if settings.url:
        limits = settings.timeout_s, settings.concurrency
        server: Server = HttpServer(settings.url, settings.ranks, *limits)
    elif model.path is None:
        raise ConfigError(
            "sglang reads a transformers model folder: give model=PATH, or the url of a server "
            "that runs"
        )
    else:
        server = EngineServer.start(str(model.path), settings.ranks)
    return SglangGenerate(server, settings.bucket_bytes)


class SglangGenerate:
    """A `RolloutEngine`. Its draws are SGLang's own: a seed does not repeat them.

    The model's own end of a sequence ends a response beside `stop_ids`.
    """

    def __init__(self, server: Server, bucket_bytes: int = 512 << 20) -> None:
        self._server, self._bucket_bytes = server, bucket_bytes
        self._version = 0
        self._sizes: dict[str, int] = {}
        self._asleep = False
        self._under_way: dict[str, list[str]] = {}

    @property
    def version(self) -> int:
        """Version of the weights that are serving."""
        return self._version

    def state(self) -> Mapping[str, Tensor]:
        """Nothing: its weights do not lie in this process."""
        return {}

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Group]:
        """Yield one group a request as each completes."""
        asked = list(requests)
        asks = asks_of(asked)
        said: list[dict[int, Any]] = [{} for _ in asked]
        left = [0] * len(asked)
        self._under_way = {request.uid: [] for request in asked}
        for ask in asks:
            left[ask.request] += 1
            self._under_way[asked[ask.request].uid].append(ask.payload["rid"])
        for number, request in enumerate(asked):
            if not left[number]:
                yield group_of(request, {})
        for place, answer in self._server.generate([ask.payload for ask in asks]):
            ask = asks[place]
            said[ask.request][ask.sample] = spoken(answer, self._version)
            left[ask.request] -= 1
            if not left[ask.request]:
                yield group_of(asked[ask.request], said[ask.request])

    def bursts(self, requests: Iterable[GenerationRequest]) -> Iterator[list[Group]]:
        """The same, each by itself: the server answers one by one."""
        return ([group] for group in self.generate(requests))

    def abort(self, uids: Collection[str] | None = None) -> None:
        """See `RolloutEngine`."""
        if uids is None:
            self._do("abort_request", {"rid": "", "abort_all": True})
        for rid in (rid for uid in uids or () for rid in self._under_way.get(uid, ())):
            self._do("abort_request", {"rid": rid, "abort_all": False})

    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        """Serve these weights from the next token on; requests under way wait meanwhile.

        Raises `SglangRefused`. Then some weights may be new and others old: the same version has
        to be loaded again, whole, before anything is sampled.
        """
        with self._updating():
            for bucket, last in _buckets(state, self._bucket_bytes):
                answer = self._server.send(bucket, flush_cache=last)
                check_done(answer, "update_weights_from_tensor", self._server.name)
        self._loaded(state, version)

    def load_broadcast(
        self,
        state: Mapping[str, Tensor],
        version: int,
        group: str,
        broadcast: Callable[[Tensor], object],
    ) -> None:
        """The same by a process group that the server has joined (`join`).

        `broadcast` sends one tensor from this process to the others of the group; it is called for
        each in order while the server is waiting for them.
        """
        payload = {
            "names": list(state),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in state.values()],
            "shapes": [list(tensor.shape) for tensor in state.values()],
            "group_name": group,
            "flush_cache": True,
        }
        with self._updating(), ThreadPoolExecutor(1) as thread:
            answer = thread.submit(self._do, "update_weights_from_distributed", payload)
            for tensor in state.values():
                broadcast(tensor)
            answer.result()
        self._loaded(state, version)

    def load_ipc(self, handles: Mapping[str, str], version: int) -> None:
        """The same from sockets, by device, that hand out CUDA memory handles."""
        with self._updating():
            payload = {"zmq_handles": dict(handles), "flush_cache": True}
            self._do("update_weights_from_ipc", payload)
        self._loaded({}, version)

    def join(self, address: tuple[str, int], members: int, group: str, backend: str) -> None:
        """Have its ranks join a process group, behind this process, the first of `members`."""
        payload = {
            "master_address": address[0],
            "master_port": address[1],
            "rank_offset": 1,
            "world_size": members,
            "group_name": group,
            "backend": backend,
        }
        self._do("init_weights_update_group", payload)

    def onload(self) -> None:
        """See `Residency`."""
        if self._asleep:
            self._do("resume_memory_occupation", {"tags": TAGS})
            self._asleep = False

    def offload(self) -> None:
        """See `Residency`. Nothing may be under way."""
        if not self._asleep:
            self._do("flush_cache", {})
            self._do("release_memory_occupation", {"tags": TAGS})
            self._asleep = True

    def resident_bytes(self) -> int:
        """Bytes of the weights it was given; its caches are not known here."""
        return 0 if self._asleep else sum(self._sizes.values())

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        """Requests under way wait, and go on whatever happens."""
        self._do("pause_generation", {"mode": "in_place"})
        try:
            self._do("begin_weight_update", {})
            try:
                yield
            finally:
                self._do("end_weight_update", {})
        finally:
            self._do("continue_generation", {})

    def _do(self, operation: str, payload: Mapping[str, Any]) -> None:
        check_done(self._server.call(operation, payload), operation, self._server.name)

    def _loaded(self, state: Mapping[str, Tensor], version: int) -> None:
        # So that every response says which weights it was sampled with.
        payload = {"new_version": str(version), "abort_all_requests": False}
        self._do("update_weight_version", payload)
        self._sizes |= {name: tensor.nbytes for name, tensor in state.items()}
        self._version = version


def _buckets(state: Mapping[str, Tensor], limit: int) -> Iterator[tuple[Named, bool]]:
    """Pieces of at most `limit` bytes, or of one tensor; and whether each is the last."""
    pieces: list[list[tuple[str, Tensor]]] = [[]]
    size = 0
    for name, tensor in state.items():
        if pieces[-1] and size + tensor.nbytes > limit:
            pieces.append([])
            size = 0
        pieces[-1].append((name, tensor))
        size += tensor.nbytes
    whole: Sequence[Named] = [piece for piece in pieces if piece]
    for place, piece in enumerate(whole):
        yield piece, place == len(whole) - 1
