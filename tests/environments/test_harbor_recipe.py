"""The recipe for terminals is one that works: its tasks are found, and its window holds the longest of them."""

import asyncio
from pathlib import Path

from compactionrl.build import build_tasks
from compactionrl.config import load_config
from compactionrl.terminal_tasks import instances, write_tasks

RECIPE = Path(__file__).parents[2] / "recipes" / "terminal.toml"


def test_its_tasks_are_those_that_its_first_lines_write(tmp_path):
    for split, count in (("train", 2), ("heldout", 1)):
        write_tasks(tmp_path / split, instances(split, ["easy"], count, 0))
    folders = {f"environment.options.{split}": str(tmp_path / split) for split in ("train", "heldout")}
    config = load_config(RECIPE, folders)
    tasks = build_tasks(config)
    assert (tasks.size("train"), tasks.size("heldout")) == (16, 8)
    longest = max(len(tasks.task(split, index).instruction) for split in ("train", "heldout") for index in range(8))
    assert longest / 3 < config.context.budget - config.context.threshold - 250  # 250 tokens: the system prompt
    environment = tasks.environment("heldout", 0)
    assert environment.tools is None
    asyncio.run(environment.close())
