"""Servers that speak vLLM's and SGLang's protocols over real HTTP, with a tiny model inside and faults on demand.

Written from the engines' documentation; the replies of vLLM 0.32 to the same requests were compared field by field.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file

from compactionrl.config import ServerConfig
from compactionrl.models import ModelConfig, Transformer

VOCAB = 64
CONTEXT = 128
TINY = ModelConfig(
    "Qwen3ForCausalLM", VOCAB, 16, 32, 1, 2, 1, 8, max_position_embeddings=CONTEXT, initializer_range=0.6
)

Fault = Callable[["Handler", dict[str, Any]], dict[str, Any] | None]
"""Gets the reply; returns another one, or None if it has answered, or not, by itself."""


def tiny_policy(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(TINY)


def policy_logprobs(
    policy: Transformer, prompt: list[int], sampled: list[int], temperature: float = 1.0
) -> list[float]:
    ids = torch.tensor([*prompt, *sampled])
    with torch.inference_mode():
        logits = policy(ids, [len(ids)]) @ policy.head_weight.T
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    return [logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(sampled)]


class FakeServer:
    """One server in a thread. `faults` are met by the next sampling requests, one each; `requests` remembers all."""

    route = ""
    """Where it samples."""
    sampling_now = 0
    """Requests that are being sampled, and have not been stopped."""

    def __init__(
        self,
        policy: Transformer | None = None,
        *,
        names: tuple[str, ...] = ("tiny",),
        context: int = CONTEXT,
        raw: bool = False,
        key: str = "",
        loading: str = "exact",
        token_seconds: float = 0.0,
    ) -> None:
        """`raw`: log-probabilities leave out the temperature. `loading`: 'exact', 'ignored', 'half', 'failing', 'missing'."""
        self.initial = policy or tiny_policy()
        self.names, self.context, self.raw, self.key = names, context, raw, key
        self.loading, self.token_seconds = loading, token_seconds
        self.faults: deque[Fault] = deque()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.sampling = self.most_sampling = 0
        self.port = 0
        self.start()

    def start(self) -> None:
        """A new process: whatever was pushed to the one before is gone."""
        self.policy = Transformer(TINY)
        self.policy.load_state_dict(self.initial.state_dict())
        self.stamp = ""
        self.paused = False
        self.aborts = 0
        self.changed = threading.Condition()
        self.connections: set[socket.socket] = set()
        self.alive = True
        fake = self

        class Bound(Handler):
            server_of_tests = fake

        self.http = Listener(("127.0.0.1", self.port), Bound)
        self.port = self.http.server_port
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """The process ends, and its connections with it."""
        self.alive = False
        with self.changed:
            self.changed.notify_all()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        self.stop()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The requests that sampled, those of checks included."""
        return [body for path, body in self.requests if path == self.route]

    def pause(self) -> None:
        with self.changed:
            self.paused = True
            self.aborts += 1
            self.changed.notify_all()
        while self.sampling_now and self.alive:
            time.sleep(0.001)

    def resume(self) -> None:
        with self.changed:
            self.paused = False
            self.changed.notify_all()

    def load(self, folder: str, stamp: str) -> None:
        tensors = load_file(Path(folder) / "model.safetensors")
        if self.loading == "half":
            tensors = {name: t for name, t in tensors.items() if "layers" not in name}
        if self.loading != "ignored":
            self.policy.load_state_dict(tensors, strict=False)
        self.stamp = stamp

    def sample(
        self, prompt: list[int], limit: int, p: dict[str, Any]
    ) -> tuple[list[tuple[int, float, list[Any]]], str]:
        """(token, log-probability, the two most likely) of each token, and the finish reason."""
        with self.changed:
            while self.paused and self.alive:
                self.changed.wait(0.05)
            epoch = self.aborts
            self.sampling_now += 1
        generator = torch.Generator().manual_seed(p["seed"] % 2**63)
        sampled: list[tuple[int, float, list[Any]]] = []
        finish = "length"
        try:
            for _ in range(limit):
                if self.aborts != epoch or not self.alive:
                    finish = "abort"
                    break
                token, logprob, top = self.draw([*prompt, *(t for t, _, _ in sampled)], p, generator)
                sampled.append((token, logprob, top))
                time.sleep(self.token_seconds)
                if token in p["stop"]:
                    finish = "stop"
                    break
        finally:
            with self.changed:
                self.sampling_now -= 1
        return sampled, finish

    @torch.inference_mode()
    def draw(self, ids: list[int], p: dict[str, Any], generator: torch.Generator) -> tuple[int, float, list[Any]]:
        logits = (self.policy(torch.tensor(ids), [len(ids)]) @ self.policy.head_weight.T)[-1]
        scaled = (logits / (p["temperature"] or 1.0)).log_softmax(-1)
        greedy = p["temperature"] == 0
        token = int(scaled.argmax()) if greedy else int(torch.multinomial(scaled.exp(), 1, generator=generator))
        shown = logits.log_softmax(-1) if self.raw else scaled
        top = shown.topk(2)
        return token, shown[token].item(), list(zip(top.indices.tolist(), top.values.tolist(), strict=True))

    @torch.inference_mode()
    def prompt_logprobs(self, ids: list[int]) -> list[float]:
        logprobs = (self.policy(torch.tensor(ids), [len(ids)]) @ self.policy.head_weight.T).log_softmax(-1)
        return [logprobs[i, token].item() for i, token in enumerate(ids[1:])]

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "max_model_len": self.context} for name in self.names]}

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
        raise NotImplementedError


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no trouble."""


class Handler(BaseHTTPRequestHandler):
    server_of_tests: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.server_of_tests.connections.add(self.connection)

    def finish(self) -> None:
        self.server_of_tests.connections.discard(self.connection)
        super().finish()

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.handle_request({})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.handle_request(json.loads(content) if content else {})

    def handle_request(self, body: dict[str, Any]) -> None:
        fake = self.server_of_tests
        parts = urlsplit(self.path)
        fake.requests.append((parts.path, body))
        fake.headers.append(dict(self.headers))
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            self.send(401, {"error": f"you sent {self.headers.get('Authorization')}, not the key"})
            return
        sampling = parts.path == fake.route
        with fake.changed:
            fake.sampling += sampling
            fake.most_sampling = max(fake.most_sampling, fake.sampling)
        try:
            status, reply = fake.answer(self.command, parts.path, parse_qs(parts.query), body)
        finally:
            with fake.changed:
                fake.sampling -= sampling
        if not fake.alive:
            self.close_connection = True
            return
        if sampling and status == 200 and fake.faults:
            reply = fake.faults.popleft()(self, reply)
            if reply is None:
                return
        self.send(status, reply)

    def send(self, status: int, reply: Any, **headers: str) -> None:
        content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def drop(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class FakeVLLM(FakeServer):
    route = "/v1/completions"

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
        match method, path:
            case "GET", "/v1/models":
                return 200, self.models()
            case "POST", "/v1/completions":
                return self.complete(body)
            case "POST", "/pause" if query == {"mode": ["abort"]}:
                self.pause()
                return 200, {"status": "paused"}
            case "POST", "/resume":
                self.resume()
                return 200, {"status": "resumed"}
            case "POST", "/reset_prefix_cache":
                return 200, {"success": not self.sampling_now}
            case "POST", "/collective_rpc" if self.loading == "missing":
                message = f"Worker failed with error ''CPUWorker' object has no attribute '{body['method']}''"
                return 500, {"error": {"message": message}}
            case "POST", "/collective_rpc" if body["method"] == "pushed_weights_version":
                return 200, {"results": [self.stamp]}
            case "POST", "/collective_rpc" if body["method"] == "load_pushed_weights":
                if self.loading == "failing":
                    return 500, {"error": {"message": "no such folder"}}
                assert self.paused
                self.load(*body["args"])
                return 200, {"results": [self.stamp]}
        return 404, {"detail": "Not Found"}

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt, limit = body["prompt"], body["max_tokens"]
        if body["model"] not in self.names:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if len(prompt) + limit > self.context:
            return 400, {"error": {"message": f"This model's maximum context length is {self.context} tokens."}}
        stop = set(body["stop_token_ids"]) | (set() if body.get("ignore_eos") else {0})
        sampled, finish = self.sample(prompt, limit, {**body, "stop": stop})
        logprobs = {
            "tokens": [f"token_id:{token}" for token, _, _ in sampled],
            "token_logprobs": [logprob for _, logprob, _ in sampled],
            "top_logprobs": [{f"token_id:{t}": v for t, v in top[: body["logprobs"]]} for _, _, top in sampled],
        }
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": finish}
        choice["prompt_logprobs"] = None
        if body.get("return_token_ids"):
            choice |= {"token_ids": [token for token, _, _ in sampled], "prompt_token_ids": prompt}
        if body.get("prompt_logprobs") is not None:
            found = zip(prompt[1:], self.prompt_logprobs(prompt), strict=True)
            choice["prompt_logprobs"] = [None, *({str(i): {"logprob": value, "rank": 1}} for i, value in found)]
        return 200, {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice]}


class FakeSGLang(FakeServer):
    route = "/generate"

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
        match method, path:
            case "GET", "/v1/models":
                return 200, self.models()
            case "GET", "/get_model_info":
                return 200, {"model_path": "tiny", "is_generation": True, "weight_version": self.stamp or "default"}
            case "POST", "/generate":
                return self.generate(body)
            case "POST", "/pause_generation" if body == {"mode": "abort"}:
                self.pause()
                return 200, {"status": "ok"}
            case "POST", "/continue_generation":
                self.resume()
                return 200, {"status": "ok"}
            case "POST", "/update_weights_from_disk":
                if self.loading == "failing":
                    return 400, {"success": False, "message": "no such folder"}
                self.load(body["model_path"], body["weight_version"])
                return 200, {"success": True, "message": "Succeeded."}
            case "POST", "/flush_cache":
                return 200, b"Cache flushed.\n"
        return 404, {"detail": "Not Found"}

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt, p = body["input_ids"], body["sampling_params"]
        limit = p["max_new_tokens"]
        if len(prompt) + limit > self.context:
            return 400, {"error": {"message": f"Requested token count exceeds the context length of {self.context}."}}
        stop = set(p["stop_token_ids"]) | (set() if p.get("ignore_eos") else {0})
        sampled, finish = self.sample(prompt, limit, {**p, "seed": p["sampling_seed"], "stop": stop})
        # SGLang looks at the length first: a stop token that comes last is reported as "length".
        finish = "length" if finish == "stop" and len(sampled) == limit else finish
        about: dict[str, Any] = {
            "finish_reason": {"type": finish},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sampled),
            "weight_version": self.stamp or "default",
        }
        if body.get("return_logprob"):
            about["output_token_logprobs"] = [[logprob, token, None] for token, logprob, _ in sampled]
            about["output_top_logprobs"] = [[[v, t, None] for t, v in top] for _, _, top in sampled]
            if body["logprob_start_len"] == 0:
                found = zip(self.prompt_logprobs(prompt), prompt[1:], strict=True)
                about["input_token_logprobs"] = [[None, prompt[0], None], *([v, i, None] for v, i in found)]
        return 200, {"text": "", "output_ids": [token for token, _, _ in sampled], "meta_info": about}


# Faults on the way


def status(code: int, text: str = "on purpose", **headers: str) -> Fault:
    def fault(handler: Handler, reply: dict[str, Any]) -> None:
        handler.send(code, {"error": {"message": text}}, **headers)

    return fault


def disconnect(handler: Handler, reply: dict[str, Any]) -> None:
    handler.drop()


def half(handler: Handler, reply: dict[str, Any]) -> None:
    """The connection breaks in the middle of the body."""
    content = json.dumps(reply).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content[: len(content) // 2])
    handler.drop()


def hang(handler: Handler, reply: dict[str, Any]) -> None:
    """No answer for as long as the client has patience."""
    with contextlib.suppress(OSError):
        handler.connection.recv(1)
    handler.drop()


def drip(handler: Handler, reply: dict[str, Any]) -> None:
    """A byte now and then: every read is quick, the answer never ends."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while handler.server_of_tests.alive:
            handler.wfile.write(b" ")
            time.sleep(0.02)


def flood(handler: Handler, reply: dict[str, Any]) -> None:
    """A body without end."""
    handler.send_response(200)
    handler.end_headers()
    handler.close_connection = True
    with contextlib.suppress(OSError):
        while handler.server_of_tests.alive:
            handler.wfile.write(b"[" * 65536)


def raw(content: bytes) -> Fault:
    def fault(handler: Handler, reply: dict[str, Any]) -> None:
        handler.send(200, content)

    return fault


@contextlib.contextmanager
def running(*servers: FakeServer) -> Iterator[None]:
    try:
        yield
    finally:
        for server in servers:
            server.stop()


def settings(*servers: FakeServer, **options: Any) -> ServerConfig:
    options = {"retries": 3, "request_seconds": 20.0, "connect_seconds": 2.0} | options
    return ServerConfig(urls=[server.url for server in servers], **options)
