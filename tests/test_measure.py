"""What acts is what the folder holds."""

from pathlib import Path

import pytest
from conftest import DEMO, TINY

from compactionrl.base import make_base
from compactionrl.config import ConfigError, load_config
from compactionrl.measure import measure, open_policy, play


def test_a_summariser_with_other_tokens_is_refused(base: Path, tmp_path: Path) -> None:
    """Its summaries would be read as other words."""
    words = {"environment.options": {"seed": 1, "notes": [6, 6], "facts": 2, "values": 3, "n_train": 9, "n_heldout": 9}}
    make_base(load_config(DEMO, TINY | words), tmp_path / "base")
    with pytest.raises(ConfigError, match="another tokenizer"):
        measure(load_config(DEMO), base, modes=["x4"], n_tasks=1, summariser=tmp_path / "base")


def test_a_training_checkpoint_is_opened_by_its_policy(base: Path, tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(base)
    config = load_config(DEMO, {"limits.turns": 3})
    direct, _ = play(config, base, mode="x4", split="heldout", index=3)
    through, _ = play(config, tmp_path, mode="x4", split="heldout", index=3)
    assert [window.token_ids for window in through.windows] == [window.token_ids for window in direct.windows]


def test_play_gives_the_rollout_that_an_evaluation_counts(base: Path) -> None:
    config = load_config(DEMO, {"limits.turns": 5, "sampling.concurrency": 1})
    played, _ = play(config, base, mode="x1", split="heldout", index=0)
    counted = measure(config, base, modes=["x1"], n_tasks=1)["x1"]
    assert counted["sampled_tokens"] == played.token_counts()["sampled"]
    assert counted["ends"][played.end] == 1


def test_a_folder_without_a_policy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no policy can be loaded.*config\.json"):
        open_policy(load_config(DEMO), tmp_path)
