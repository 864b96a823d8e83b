"""The command line: overrides, messages and exit codes. What the commands compute is tested where it is computed."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from compactionrl import __version__
from compactionrl.cli import main, split_overrides
from compactionrl.config import ConfigError, load_config, parse_config

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
    assert [word for word in words if word not in err] == []


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
