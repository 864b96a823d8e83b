"""From a configuration and a checkpoint to a running server."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn

from compactionrl import build
from compactionrl.config import Config, ConfigError
from compactionrl.samplers.http import read_key
from compactionrl.serving.app import create_app
from compactionrl.serving.engine import Engine
from compactionrl.serving.guard import is_loopback
from compactionrl.serving.model import ServedModel
from compactionrl.serving.sessions import Sessions
from compactionrl.serving.weights import Weights

GRACE_SECONDS = 5
"""Most seconds from the signal to the end."""
BACKLOG = 2048
"""Connections that may wait to be taken."""


def serve(
    config: Config,
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str = "",
    max_length: int | None = None,
    key_variable: str = "",
    weights_from: Path | None = None,
) -> None:
    """Serve the policy in `folder` until SIGINT or SIGTERM. Raises ConfigError for what cannot work."""
    key = read_key(key_variable, "--key-variable")
    if weights_from and not weights_from.is_dir():
        raise ConfigError(f"--allow-weights-from {weights_from}: there is no such folder")
    with listen(host, port) as listener:
        model = open_model(config, folder, name=name, max_length=max_length)
        listener.listen(BACKLOG)  # who reads the address below can connect
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        print(f"{model.name}: contexts of {model.max_length} tokens on {address}", file=sys.stderr, flush=True)
        if not key and not is_loopback(host):
            print(
                "Warning: whoever reaches this address can use the server, there is no authentication: set --key-variable",
                file=sys.stderr,
                flush=True,
            )
        server = Server(model, create_app(model, Weights(model, weights_from), key))
        asyncio.run(server.serve([listener]))


class Server(uvicorn.Server):
    """One that ends what is open when it is told to end."""

    def __init__(self, model: ServedModel, app: object) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http="h11",
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        self.model = model
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Answer what is open with what there is, and end; at once if it is said twice. May come from any thread."""
        self.force_exit, self.should_exit = self.should_exit, True
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.model.engine.close)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends the process with exit code 0, where uvicorn would raise the signal again."""
        self._loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        for number in signals:
            self._loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                self._loop.remove_signal_handler(number)


def open_model(config: Config, folder: Path, *, name: str = "", max_length: int | None = None) -> ServedModel:
    """The policy in `folder`: a model folder, or a checkpoint that training wrote."""
    label = name or folder.resolve().name
    folder = folder / "policy" if (folder / "policy").is_dir() else folder
    if isinstance(config.run.threads, int):
        torch.set_num_threads(config.run.threads)
    policy = build.build_policy(config, folder)
    positions = policy.config.max_position_embeddings
    if max_length is not None and max_length > positions:
        raise ConfigError(f"--max-length {max_length}: this model has {positions} positions")
    engine = Engine(policy, max_rows=config.sampling.concurrency, max_tokens_per_row=max_length or positions)
    sessions = Sessions(engine, config.sampling.concurrency)
    return ServedModel(label, policy, build.build_chat(config, folder), engine, sessions)


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that nobody waits for a model to learn that the port is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error}") from None
    return listener
