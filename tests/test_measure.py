"""What acts is what the folder holds."""

from pathlib import Path

import pytest
from conftest import DEMO, TINY

from compactionrl.base import make_base
from compactionrl.config import ConfigError, load_config
from compactionrl.measure import evaluate_into, measure, open_policy, play


def test_a_summariser_with_other_tokens_is_refused(base: Path, tmp_path: Path) -> None:
    """Its summaries would be read as other words."""
    words = {"environment.options": {"seed": 1, "notes": [6, 6], "facts": 2, "values": 3, "n_train": 9, "n_heldout": 9}}
    make_base(load_config(DEMO, TINY | words), tmp_path / "base")
    config = load_config(DEMO, {"model.path": str(base), "evaluation.summarisers": ["own", str(tmp_path / "base")]})
    with pytest.raises(ConfigError, match="another tokenizer"):
        evaluate_into(tmp_path / "results", config)
    assert not (tmp_path / "results").exists()


def test_a_training_checkpoint_is_opened_by_its_policy(base: Path, tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(base)
    direct, through = [
        play(load_config(DEMO, {"limits.turns": 3, "model.path": str(path)}), mode="x4", split="heldout", index=3)[0]
        for path in (base, tmp_path / "policy")
    ]
    assert [window.token_ids for window in through.windows] == [window.token_ids for window in direct.windows]


def test_play_gives_the_rollout_that_an_evaluation_counts(base: Path) -> None:
    config = load_config(DEMO, {"limits.turns": 5, "sampling.concurrency": 1, "model.path": str(base)})
    played, _ = play(config, mode="x1", split="heldout", index=0)
    counted = measure(config, base, modes=["x1"], n_tasks=1)["x1"]
    assert counted["sampled_tokens"] == played.token_counts()["sampled"]
    assert counted["ends"][played.end] == 1


def test_a_folder_without_a_policy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no policy can be loaded.*config\.json"):
        open_policy(load_config(DEMO), tmp_path)
