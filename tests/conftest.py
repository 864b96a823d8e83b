"""A base for the demo's recipe that has hardly learned anything: enough to run every command, and made in a moment."""

import signal
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "recipes" / "demo.toml"
TINY = {
    "warm_start.hidden_size": 32,
    "warm_start.intermediate_size": 64,
    "warm_start.demonstrations": 8,
    "warm_start.epochs": 1,
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from compactionrl.base import make_base
    from compactionrl.config import load_config

    folder = tmp_path_factory.mktemp("made") / "base"
    make_base(load_config(DEMO, TINY), folder)
    return folder


# A shell starts background jobs with SIGINT ignored, and children inherit that: tests that press Ctrl-C would press in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)
