"""The two ways to reach an SGLang: by HTTP, or as an `Engine` in this process."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from torch import Tensor

from rlinf.workers.engines.sglang.wire import SglangRefused
from rlinf.workers.errors import ConfigError
from rlinf.workers.http_post import FAILURES, Refused, post

__all__ = ["EngineServer", "HttpServer", "Named", "Server"]

Named = Sequence[tuple[str, Tensor]]
NOT_FOUND = 404
LATE_ADDITIONS = ("begin_weight_update", "end_weight_update")
"""What older servers do not know: they take new weights without."""


class Server(Protocol):
    """An SGLang. Every call has a deadline and raises `SglangRefused`."""

    name: str

    def generate(self, payloads: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
        """Ask for all of them at once; (which, the answer to it) as each is there."""

    def call(self, operation: str, payload: Mapping[str, Any]) -> Any:
        """One of SGLang's operations besides generating."""

    def send(self, named: Named, *, flush_cache: bool) -> Any:
        """Overwrite these weights; the answer is for `check_done`."""


class HttpServer:
    """A server at `url`, as `python -m sglang.launch_server` starts it.

    Weights reach it as handles of shared memory, on its own host only. It must have been started
    with --enable-memory-saver and --enable-weights-cpu-backup if it is to leave its device.

    Args:
        url: Of its root.
        ranks: Its tensor parallel size.
        timeout_s: Deadline of a call, that of a generation included.
        concurrency: Calls under way at the same time.
    """

    def __init__(
        self, url: str, ranks: int = 1, timeout_s: float = 600.0, concurrency: int = 256
    ) -> None:
        self.name = url.rstrip("/")
        self._ranks, self._timeout_s, self._concurrency = ranks, timeout_s, concurrency

    def generate(self, payloads: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
        """See `Server`."""
        if not payloads:
            return
        with ThreadPoolExecutor(min(len(payloads), self._concurrency)) as threads:
            asked = {
                threads.submit(self.call, "generate", payload): place
                for place, payload in enumerate(payloads)
            }
            try:
                for done in as_completed(asked):
                    yield asked[done], done.result()
            finally:
                for waiting in asked:
                    waiting.cancel()

    def call(self, operation: str, payload: Mapping[str, Any]) -> Any:
        """See `Server`."""
        body = json.dumps(payload).encode()
        try:
            answer = post(f"{self.name}/{operation}", body, self._timeout_s)
        except Refused as refused:
            if refused.status == NOT_FOUND and operation in LATE_ADDITIONS:
                return None
            said = refused.body[:500].decode(errors="replace")
            raise self._error(operation, f"answered {refused.status}: {said}") from refused
        except FAILURES as failure:
            raise self._error(
                operation, f"cannot be reached within {self._timeout_s:g} s: {failure}"
            ) from failure
        try:
            return json.loads(answer) if answer.strip()[:1] in (b"{", b"[") else None
        except ValueError as error:
            raise self._error(operation, f"answered no JSON: {answer[:100]!r}") from error

    def send(self, named: Named, *, flush_cache: bool) -> Any:
        """See `Server`."""
        handles = [self._handles(named) for _ in range(self._ranks)]
        payload = {"serialized_named_tensors": handles, "flush_cache": flush_cache}
        return self.call("update_weights_from_tensor", payload)

    @staticmethod
    def _handles(named: Named) -> str:
        """Where the tensors lie, as SGLang reads it; whoever reads it opens their memory."""
        import torch.multiprocessing  # noqa: F401 - teaches the pickler tensors

        # In host memory a copy: pickling moves a tensor into memory that can be shared.
        sent = [(n, t.detach().clone() if t.device.type == "cpu" else t.detach()) for n, t in named]
        pickled = ForkingPickler.dumps(sent)
        return base64.b64encode(pickled).decode()

    def _error(self, operation: str, what: str) -> SglangRefused:
        return SglangRefused(
            f"SGLang at {self.name} {what} (operation {operation}); see that server's log",
            operation=operation,
            server=self.name,
        )


class EngineServer:
    """An `sglang.Engine`, made here or given.

    Args:
        engine: One that runs.
    """

    name = "in this process"

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @classmethod
    def start(cls, model_path: str, ranks: int = 1, **options: Any) -> "EngineServer":
        """Start an engine for a transformers model folder on this process's GPUs."""
        try:
            from sglang import Engine
        except ImportError as error:
            raise ConfigError(
                "the rollout engine sglang needs its package, which wants an environment of its "
                f"own with a GPU: pip install 'rlinf-workers[sglang]' ({error})"
            ) from error
        fixed = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        return cls(Engine(model_path=model_path, tp_size=ranks, **fixed | options))

    def generate(self, payloads: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
        """See `Server`; all answers come together."""
        if not payloads:
            return
        columns = {
            key: [payload[key] for payload in payloads]
            for key in ("input_ids", "sampling_params", "rid")
        }
        yield from enumerate(self._engine.generate(**columns, return_logprob=True))

    def call(self, operation: str, payload: Mapping[str, Any]) -> Any:
        """See `Server`. What an engine has no method for concerns requests that run meanwhile."""
        if operation == "abort_request":
            return self._engine.tokenizer_manager.abort_request(**payload)
        method = getattr(self._engine, operation, None)
        return None if method is None else method(**payload)

    def send(self, named: Named, *, flush_cache: bool) -> Any:
        """See `Server`."""
        tensors = [(name, tensor.detach()) for name, tensor in named]
        return self._engine.update_weights_from_tensor(tensors, flush_cache=flush_cache)
