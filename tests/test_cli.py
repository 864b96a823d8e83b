"""The command line: overrides, messages and exit codes. What the commands compute is tested where it is computed."""

import json
import os
import subprocess
import sys
import tomllib
from itertools import cycle
from pathlib import Path

import pytest

from compactionrl import __version__
from compactionrl.cli import main, split_overrides
from compactionrl.config import ConfigError, load_config, parse_config
from compactionrl.environments.notes import NotesEnvironment
from compactionrl.environments.protocol import Verdict

DEMO = Path(__file__).parents[1] / "recipes" / "demo.toml"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command in this process."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"{__version__}\n", "")


def test_config_prints_what_will_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "config", "--train.steps", "7", str(DEMO), "--run.folder=elsewhere")
    expected = load_config(DEMO, {"train.steps": 7, "run.folder": "elsewhere"})
    assert code == 0
    assert parse_config(tomllib.loads(out)) == expected


def test_overrides_stand_anywhere_and_the_last_one_counts() -> None:
    rest, overrides = split_overrides(
        ["train", "--train.alpha", "2", "a.toml", "--run.seed=1", "--resume", "--run.seed", "3", "--train.gamma", "-1"]
    )
    assert rest == ["train", "a.toml", "--resume"]
    assert overrides == {"train.alpha": 2, "run.seed": 3, "train.gamma": -1}


def test_an_override_may_hold_anything_after_the_equals_sign() -> None:
    assert split_overrides(["--context.summary_request=--a=b\nc"])[1] == {"context.summary_request": "--a=b\nc"}


def unwrapped(text: str) -> str:
    """A message as one line, however wide the box around it is."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("arguments", [["--train.steps"], ["--train.whiten", "--resume"]])
def test_an_override_without_value(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"{arguments[0]} needs a value"):
        split_overrides(arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["config", "missing.toml"], ["missing.toml"]),
        (["config", "--train.stepz", "1"], ["train.stepz", "unknown key"]),
        (["config", "--train.steps", "many"], ["train.steps", "integer"]),
        (["config", "--context.threshold", "9"], ["context.threshold", "raise the threshold"]),
        (["config", "--train.steps"], ["train.steps", "needs a value"]),
        (["config", "--nonsense"], ["--nonsense"]),
        (["konfig"], ["konfig"]),
        (["config", str(DEMO.parent)], ["directory"]),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    assert [word for word in words if word not in unwrapped(err)] == []


def test_threads_are_set_before_torch_can_be_imported() -> None:
    """And what the user has set stays."""
    script = "import os, compactionrl.cli as c\ntry: c.main(['--version'])\nexcept SystemExit: pass\n"
    script += "print(os.environ['OMP_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'])"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
    for given, expected in (({}, "1 PASSIVE"), ({"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "active"}, "3 active")):
        ran = subprocess.run(
            [sys.executable, "-c", script], env=clean | given, capture_output=True, text=True, check=True
        )
        assert ran.stdout.splitlines()[-1] == expected


@pytest.fixture
def tiny(base: Path, tmp_path: Path) -> list[str]:
    """The demo with a random base, four rollouts a batch, two policy updates."""
    keys = {
        "model.path": str(base),
        "run.folder": str(tmp_path / "run"),
        "limits.turns": 8,
        "train.steps": 2,
        "train.rollouts_per_step": 4,
        "train.value_pretraining_steps": 1,
        "evaluation.every": 0,
        "evaluation.tasks": 2,
        "evaluation.final_tasks": 4,
    }
    return [str(DEMO), *(f"--{key}={value}" for key, value in keys.items())]


def test_demo_measures_trains_measures_and_is_shown_again(
    capsys: pytest.CaptureFixture[str], tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This base never solves a task, so every second rollout is rewarded as if it had: there is something to learn."""
    rewards = cycle([0.0, 1.0])

    async def verify(self: NotesEnvironment) -> Verdict:
        return Verdict(next(rewards))

    monkeypatch.setattr(NotesEnvironment, "verify", verify)
    tiny.append("--train.policy_lr=0.1")
    code, out, _ = run(capsys, "demo", *tiny)
    assert code == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary.keys() == {"base", "trained", "minutes", "resumed"}
    for policy in ("base", "trained"):
        assert summary[policy].keys() == {"x1", "x4", "long"}
        for result in summary[policy].values():
            assert (result["pass_at_1"], result["n"]) == (0.5, 4)
            assert (result["low"], result["high"]) == pytest.approx((0.1500, 0.8500), abs=5e-5)  # Wilson, by hand
    assert summary["base"]["x4"]["sampled_tokens"] != summary["trained"]["x4"]["sampled_tokens"]
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "trained" in out

    again, shown, _ = run(capsys, "demo", *tiny)
    assert again == 0
    assert "complete" in shown
    assert out.endswith(shown[shown.index("Pass@1") :])


def test_train_refuses_a_used_folder_and_resumes(
    capsys: pytest.CaptureFixture[str], tiny: list[str], tmp_path: Path
) -> None:
    assert run(capsys, "train", *tiny)[0] == 0
    code, _, err = run(capsys, "train", *tiny)
    assert code == 2
    assert "--resume" in err
    assert run(capsys, "train", *tiny, "--resume", "--train.steps=3")[0] == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 3

    checkpoint = str(tmp_path / "run" / "checkpoints" / "best")
    results = ["--modes", "x1", "--output", str(tmp_path / "results")]
    code, _, _ = run(capsys, "eval", *tiny, "--checkpoint", checkpoint, *results)
    assert code == 0
    about = json.loads((tmp_path / "results" / "results.json").read_text())["about"]
    assert "checkpoints/step-" in about["sampler"]  # what the link points to today


def test_eval_writes_what_it_shows(
    capsys: pytest.CaptureFixture[str], tiny: list[str], base: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.symlink_to(base)
    arguments = ["--modes", "x4,x1", "--limit", "3", "--output", str(tmp_path / "results"), "--runs", "2"]
    code, out, _ = run(capsys, "eval", *tiny, *arguments, "--summariser", f"own,{other}")
    assert code == 0
    results = json.loads((tmp_path / "results" / "results.json").read_text())["arms"]
    assert list(results) == ["x4", "x4+other", "x1"]
    assert [result["n"] for result in results.values()] == [6, 6, 6]
    assert [result["outcomes"] for result in results.values()] == ["000 000"] * 3
    assert results["x4"]["sampled_tokens"] == results["x4+other"]["sampled_tokens"]  # it is the same model
    for name in results:
        assert name in out
    assert "long" not in out


def test_rollout_shows_the_rollout_that_eval_measures(
    capsys: pytest.CaptureFixture[str], tiny: list[str], tmp_path: Path
) -> None:
    code, out, _ = run(capsys, "rollout", *tiny, "--index", "1", "--mode", "x1")
    assert code == 0
    assert "notes-heldout-1  x1-heldout-1" in out
    assert "window 1" in out
    assert "window 2" not in out
    assert run(capsys, "rollout", *tiny, "--index", "1", "--mode", "x1")[1] == out

    evaluated = ["--output", str(tmp_path / "results"), "--modes", "x1", "--limit", "2"]
    assert run(capsys, "eval", *tiny, *evaluated)[0] == 0
    stored = ["--from", str(tmp_path / "results")]
    assert run(capsys, "rollout", *stored, "--id", "x1-heldout-1")[1] == out
    listed = run(capsys, "rollout", *stored)[1].splitlines()
    assert sorted(line.split()[0] for line in listed) == ["x1-heldout-0", "x1-heldout-1"]
    code, _, err = run(capsys, "rollout", *stored, "--id", "x4-heldout-1")
    assert code == 2
    assert "x4-heldout-1" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "--modes", "x1,x0"], ["evaluation.modes", "x4"]),
        (["eval", "--limit", "0"], ["--limit"]),
        (["eval", "--tasks", "notez"], ["--tasks", "notez", "notes, logbook", "module:Class"]),
        (["eval", "--tasks", "nowhere:Tasks"], ["environment.tasks", "nowhere"]),
        (["eval", "--output", "/dev/null/results"], ["/dev/null/results"]),
        (["eval", "--output", str(DEMO)], ["--output", "is a file"]),
        (["eval", "--budget", "64kb"], ["--budget", "64kb", "64k"]),
        (["eval", "--budget", "64"], ["context.threshold", "context.budget"]),
        (["eval", "--model", "glm"], ["--model", "--url", "--checkpoint"]),
        (["eval", "--checkpoint", str(DEMO.parent), "--url", "http://127.0.0.1:9"], ["--checkpoint", "--url"]),
        (["eval", "--url", "127.0.0.1:9"], ["server.urls", "http://"]),
        (["eval", "--url", "http://127.0.0.1:9", "--api", "openai"], ["--api openai", "auto, vllm, sglang, chat"]),
        (["eval", "--url", "http://127.0.0.1:9"], ["http://127.0.0.1:9", "no answer"]),
        (["eval", "--context.budget", "70", "--limit", "16", "--modes", "x4"], ["task does not fit", "context.budget"]),
        (["eval", "--checkpoint", str(DEMO.parent)], ["model.path", str(DEMO.parent), "config.json"]),
        (["eval", "--model.path", "nowhere"], ["model.path", "nowhere"]),
        (["rollout", "--from", "/nowhere"], ["--from", "/nowhere"]),
        (["rollout", "--from", str(DEMO.parent)], ["--from", "no evaluation"]),
        (["rollout", "--index", "-1"], ["--index"]),
        (["rollout", "--split", "test"], ["test", "heldout"]),
        (["rollout", "--mode", "x0"], ["x0", "x4"]),
        (["train", "--sampling.top_p", "0.5"], ["sampling.top_p"]),
        (["train", "--environment.tasks", "nowhere:Tasks"], ["environment.tasks", "nowhere"]),
        (["train", "--resume"], ["run.folder", "without --resume"]),
        (["train", "--run.folder", "/dev/null/run"], ["/dev/null/run", "choose another run.folder"]),
    ],
)
def test_commands_refuse_what_cannot_work(
    capsys: pytest.CaptureFixture[str],
    tiny: list[str],
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, arguments[0], *tiny, *arguments[1:])
    assert not (tmp_path / "runs").exists() or "kept in" in err
    assert code == 2
    assert "Traceback" not in err
    assert [word for word in words if word not in unwrapped(err)] == []
