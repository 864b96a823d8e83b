"""A base for the demo's recipe with random weights: enough to run every command, and made in a moment."""

from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "recipes" / "demo.toml"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from compactionrl import build
    from compactionrl.config import load_config
    from compactionrl.environments.notes import NOTES_PROMPTS
    from compactionrl.models import save_policy
    from compactionrl.training.tokenizer import build_tokenizer
    from compactionrl.training.warm_start import new_policy

    config = load_config(DEMO, {"warm_start.hidden_size": 32, "warm_start.intermediate_size": 64})
    prompts = [getattr(config.context, key) for key in NOTES_PROMPTS]
    tokenizer = build_tokenizer([*build.build_tasks(config).texts, *prompts])  # type: ignore[attr-defined]
    folder = tmp_path_factory.mktemp("base")
    save_policy(new_policy(config, tokenizer), folder)
    tokenizer.save_pretrained(folder)
    return folder
