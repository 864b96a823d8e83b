"""kill -9 at any moment, then resume: the run ends with the same weights, bit for bit (invariant 8).

COMPACTIONRL_KILLS sets how often (default 3); every other kill waits for a checkpoint that is being written.
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from training_tasks import make_base

from compactionrl.training.checkpoint import Checkpoints
from compactionrl.training.records import read_rollouts

KILLS = int(os.environ.get("COMPACTIONRL_KILLS", "3"))
STEPS = 3 * KILLS + 1
BATCHES = 2 + STEPS  # with value pretraining
SCRIPT = Path(__file__).parent / "run_tiny.py"
DEMO = Path(__file__).parents[2] / "recipes" / "demo.toml"
WARM = {
    "model.path": "warm-start",
    "warm_start.hidden_size": 32,
    "warm_start.intermediate_size": 64,
    "warm_start.demonstrations": 256,
    "limits.turns": 8,
    "train.steps": 1,
    "train.rollouts_per_step": 4,
    "train.value_pretraining_steps": 1,
    "evaluation.every": 0,
    "evaluation.tasks": 2,
}


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    return spawn(str(SCRIPT), str(folder), str(STEPS), *options)


def start_warm(folder: Path, *options: str) -> subprocess.Popen[str]:
    """`compactionrl train`, from nothing: tokenizer, demonstrations, base, value pretraining, one step."""
    keys = {**WARM, "run.folder": folder / "run"}
    return spawn("-m", "compactionrl.cli", "train", str(DEMO), *(f"--{k}={v}" for k, v in keys.items()), *options)


def spawn(*arguments: str) -> subprocess.Popen[str]:
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": f"{source}:{SCRIPT.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> bool:
    """Whether the condition came true before the process ended."""
    while process.poll() is None:
        if condition():
            return True
        time.sleep(0.0005)
    return False


def writing(folder: Path) -> bool:
    return any(folder.glob("run/checkpoints/.partial-*"))


def written(folder: Path) -> list[str]:
    """Names of the checkpoints, oldest first."""
    return Checkpoints(folder / "run" / "checkpoints", keep=1).names()


def lines(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_somewhere(folder: Path, process: subprocess.Popen[str], number: int) -> bool:
    """Kill after a few batches: at any moment, or while a checkpoint is being written; False if it ended before."""
    rng = random.Random(number)
    before, reached = written(folder)[-1:], lines(folder) + rng.randint(1, 3)
    if number % 2:
        alive = wait_for(process, lambda: writing(folder) and written(folder)[-1:] != before)
        pause = rng.uniform(0, 0.02)  # about as long as a checkpoint takes
    else:
        alive = wait_for(process, lambda: lines(folder) >= reached)
        pause = rng.uniform(0, 0.6)  # about as long as a batch takes
    return kill(process, pause if alive else 0)


def kill(process: subprocess.Popen[str], pause: float) -> bool:
    """Kill after `pause` seconds; False if it ended before."""
    time.sleep(pause)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def final(folder: Path, step: int = STEPS) -> dict[str, str]:
    checkpoint = folder / "run" / "checkpoints" / f"step-{step:06}"
    files = sorted(checkpoint.rglob("*.safetensors"))
    assert len(files) == 4
    return {str(f.relative_to(checkpoint)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.mark.timeout(120 + 60 * KILLS)
def test_killed_runs_end_like_one_that_was_not(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("whole", "killed")}
    for folder in folders.values():
        make_base(folder / "base")
    finish(start(folders["whole"]))

    killed = folders["killed"]
    kills = 0
    for number in range(KILLS):
        resumable = (killed / "run" / "config.toml").exists()
        if not kill_somewhere(killed, start(killed, *(["--resume"] if resumable else [])), number):
            break
        kills += 1
        print(f"kill {number}: {lines(killed)} lines, checkpoints {written(killed)}, half written: {writing(killed)}")
    assert kills
    finish(start(killed, "--resume"))

    assert final(killed) == final(folders["whole"])
    assert not writing(killed)
    seen = [r.task_id for path in sorted((killed / "run" / "rollouts").iterdir()) for r in read_rollouts(path)]
    assert len(seen) == len(set(seen)) == 6 * BATCHES
    assert lines(killed) == lines(folders["whole"])


def test_a_warm_start_is_killed_and_resumed_like_everything_else(tmp_path: Path) -> None:
    """Killed while demonstrations are played or learned, while the base is being written, and right behind it."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start_warm(whole))
    base, partial = killed / "run" / "base", killed / "run" / ".partial-base"
    rng = random.Random(KILLS)
    moments: list[tuple[Callable[[], bool], float]] = [
        (lambda: (killed / "run" / "config.toml").exists(), rng.uniform(0, 0.5)),
        (partial.exists, rng.uniform(0, 0.005)),
        (base.exists, rng.uniform(0, 0.1)),
    ]
    for number, (reached, pause) in enumerate(moments):
        process = start_warm(killed, *(["--resume"] if number else []))
        assert wait_for(process, reached)
        assert kill(process, pause)
        print(f"kill {number}: base {base.exists()}, half written {partial.exists()}, {lines(killed)} lines")
    finish(start_warm(killed, "--resume"))
    assert final(killed, 1) == final(whole, 1)
    weights = [(folder / "run" / "base" / "model.safetensors").read_bytes() for folder in (whole, killed)]
    assert weights[0] == weights[1]
    assert lines(killed) == lines(whole)
