"""A stand-in for SGLang's server that speaks its HTTP protocol over loopback.

It "samples" ids that follow from the prompt and the weights, keeps requests waiting while it is
paused or until they are let go, and answers as the real one does: `meta_info`, `success`.
"""

import base64
import contextlib
import json
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


@dataclass
class FakeSglang:
    """What the server knows and was asked.

    `hold_after`: from so many tokens on a request waits to be aborted. `refuse`: operations that
    answer with `success` false. `missing`: operations that are unknown. `broken`: bodies to answer.
    """

    weights: dict[str, torch.Tensor]
    hold_after: int | None = None
    refuse: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    broken: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    version: str = "default"
    url: str = ""
    paused: bool = False
    awake: bool = True
    aborted: set[str] = field(default_factory=set)
    holding: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    changed: threading.Condition = field(default_factory=threading.Condition)
    broadcast: Any = None

    def operations(self) -> list[str]:
        """What was asked beside generating."""
        return [name for name, _ in self.asked if name != "generate"]

    def answer(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and answer."""
        self.asked.append((name, body))
        if name in self.missing:
            return 404, {"detail": "Not Found"}
        if name in self.broken:
            return self.broken[name]
        if name in self.refuse:
            return 400, {"success": False, "message": f"no {name} today"}
        with self.changed:
            answer = getattr(self, f"do_{name}")(body)
            self.changed.notify_all()
        return 200, answer

    def do_generate(self, body: dict[str, Any]) -> Any:
        assert body["return_logprob"]
        assert self.awake
        limit = body["sampling_params"]["max_new_tokens"]
        stops = body["sampling_params"]["stop_token_ids"]
        seed = sum(body["input_ids"]) + len(body["rid"])
        drawn, reason = [], {"type": "length", "length": limit}
        for step in range(limit):
            if self.hold_after is not None and step == self.hold_after:
                self.holding.release()
                assert self.changed.wait_for(lambda: body["rid"] in self.aborted, 30)
                reason = {"type": "abort", "message": "Aborted"}
                break
            assert self.changed.wait_for(lambda: not self.paused, 30)
            token = (seed + 7 * len(body["input_ids"]) + 3 * step) % 50
            drawn.append([-0.5 - step, token, None])
            if token in stops:
                reason = {"type": "stop", "matched": token}
                break
        about = {
            "id": body["rid"],
            "finish_reason": reason,
            "output_token_logprobs": drawn,
            "weight_version": self.version,
        }
        return {"text": "?", "output_ids": [t for _, t, _ in drawn], "meta_info": about}

    def do_abort_request(self, body: dict[str, Any]) -> None:
        everyone = [b["rid"] for name, b in self.asked if name == "generate"]
        self.aborted |= set(everyone) if body["abort_all"] else {body["rid"]}

    def do_update_weights_from_tensor(self, body: dict[str, Any]) -> Any:
        assert self.paused
        for name, tensor in pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])):
            self.weights[name].copy_(tensor)
        return {"success": True, "message": "Success"}

    def do_update_weights_from_distributed(self, body: dict[str, Any]) -> Any:
        assert self.paused
        for name, kind, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            got = self.broadcast.get(timeout=30)
            assert (str(got.dtype), list(got.shape)) == (f"torch.{kind}", shape)
            self.weights[name].copy_(got)
        return {"success": True, "message": "Succeeded"}

    def do_update_weights_from_ipc(self, body: dict[str, Any]) -> Any:
        return {"success": bool(body["zmq_handles"]), "message": "from handles"}

    def do_init_weights_update_group(self, body: dict[str, Any]) -> Any:
        return {"success": True, "message": "joined"}

    def do_update_weight_version(self, body: dict[str, Any]) -> Any:
        self.version = body["new_version"]
        return {"success": True, "message": "updated", "new_version": self.version}

    def do_pause_generation(self, body: dict[str, Any]) -> Any:
        self.paused = True
        return {"message": "Generation paused successfully.", "status": "ok"}

    def do_continue_generation(self, body: dict[str, Any]) -> Any:
        self.paused = False
        return {"message": "Generation continued successfully.", "status": "ok"}

    def do_begin_weight_update(self, body: dict[str, Any]) -> Any:
        return {"success": True, "message": ""}

    do_end_weight_update = do_begin_weight_update

    def do_flush_cache(self, body: dict[str, Any]) -> str:
        return "Cache flushed."

    def do_release_memory_occupation(self, body: dict[str, Any]) -> None:
        assert self.awake
        self.awake = False

    def do_resume_memory_occupation(self, body: dict[str, Any]) -> None:
        assert not self.awake
        self.awake = True


@contextlib.contextmanager
def running(fake: FakeSglang) -> Iterator[FakeSglang]:
    """The fake, served at `fake.url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = fake.answer(self.path.lstrip("/"), body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            if isinstance(answer, str):
                data = answer.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(0 if answer is None else len(data)))
            self.end_headers()
            self.wfile.write(b"" if answer is None else data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
