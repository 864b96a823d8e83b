"""A policy behind a server of ours, in a thread; and the command, in this process or another."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import DEMO

from compactionrl.config import load_config
from compactionrl.evaluation.rollout_file import read_rollouts
from compactionrl.serving.app import create_app
from compactionrl.serving.serve import Server, listen, open_model
from compactionrl.serving.weights import Weights

SRC = Path(__file__).parents[2] / "src"
sys.path.append(str(Path(__file__).parents[1] / "samplers"))  # the fake servers


@contextmanager
def serving(folder: Path, *, name: str = "tiny", key: str = "", port: int = 0, **options: Any) -> Iterator[str]:
    """The address of a server of the policy in `folder`."""
    listener = listen("127.0.0.1", port)
    model = open_model(load_config(DEMO, options), folder, name=name)
    server = Server(model, create_app(model, Weights(model, None), key))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        thread.join()


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`compactionrl eval` on the demo's recipe in a process of its own."""
    command = [sys.executable, "-m", "compactionrl.cli", "eval", str(DEMO), *arguments]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(SRC), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def ledgers(folder: Path) -> dict[str, list[Any]]:
    """Id -> every token of every window, who sampled it and with which log-probability."""
    return {
        rollout.id: [(window.token_ids, window.segment_ids, window.logprobs) for window in rollout.windows]
        for rollout in read_rollouts(folder / "rollouts.jsonl.gz")
    }
