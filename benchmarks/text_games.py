"""Walkthroughs of TextWorld's cooking games, with compaction off and on: whether the score survives, and what it costs.

python benchmarks/text_games.py [--games 8] [--output docs/games.md]

A script plays each held-out game's own walkthrough, in one window and then under budgets where that takes several
compactions; it knows what is left to do from its last summary alone. A summary that got lost, a step that came twice or not
at all, an observation that reached the wrong window: any of them costs points. Tokens are words and punctuation marks. The
table is written into the page between its two marks. Needs the extras `games` and `eval`; games are generated first.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compactionrl.config import (
    PLACEHOLDER,
    RESUME_TEMPLATE,
    RETRY_REQUEST,
    SUMMARY_REQUEST,
    ContextConfig,
    LimitsConfig,
)
from compactionrl.environments.text_game import WalkthroughDemonstrator
from compactionrl.environments.textworld import TextWorldTasks
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.collect import Job, collect
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.training.tokenizer import build_tokenizer


@dataclass(frozen=True)
class Size:
    """Of a game; `summary`: tokens that the list of what is left may take, `budgets`: those (C) that it is played under."""

    settings: dict[str, int]
    summary: int
    budgets: tuple[int, ...]


SIZES = {
    "1 room, 3 ingredients": Size({"recipe": 3, "take": 3, "go": 1}, 150, (620, 720)),
    "6 rooms, 3 ingredients": Size({"recipe": 3, "take": 3, "go": 6}, 200, (740, 900)),
    "12 rooms, 5 ingredients": Size({"recipe": 5, "take": 5, "go": 12}, 360, (1700, 2000)),
}
SKILLS = {"open": True, "cook": True, "cut": True}
FRAME = 120
"""Tokens of the request for a summary, and of the shortest response."""

LONG = 200_000
MARKS = "<!-- walkthroughs -->", "<!-- end of walkthroughs -->"
HEAD = ("games", "C", "games kept at 1.0", "mean reward", "steps", "tokens sampled and read", "compactions")


@dataclass
class Played:
    rollouts: list[Rollout]
    seconds: float


def context(budget: int, summary: int) -> ContextConfig:
    """One window where the budget is LONG, else up to 8 compactions."""
    return ContextConfig(
        budget=budget,
        threshold=summary + FRAME,
        summary_tokens=summary,
        response_tokens=32,
        min_response=16,
        max_compactions=0 if budget == LONG else 8,
    )


def play(tasks: TextWorldTasks, budget: int, summary: int) -> Played:
    """Every held-out game once."""
    size = tasks.size("heldout")
    texts = [text for facts in tasks.facts("heldout") for text in (*facts.texts, *facts.walkthrough)]
    tokenizer = build_tokenizer([*texts, SUMMARY_REQUEST, RETRY_REQUEST, RESUME_TEMPLATE, PLACEHOLDER])
    jobs = ([Job("heldout", i, f"game-{i}", i)] for i in range(size))
    settings = RolloutSettings(context(budget, summary), LimitsConfig(turns=400))
    began = time.perf_counter()
    demonstrator = WalkthroughDemonstrator(tasks, tokenizer)
    collected = asyncio.run(
        collect(tasks, demonstrator, ChatFormat(tokenizer), settings, jobs, size, concurrency=8, retries=0)
    )
    for rollout in collected.dropped:
        raise RuntimeError(f"{rollout.task_id} broke down: {rollout.error}")
    return Played(collected.rollouts, time.perf_counter() - began)


def spread(values: Sequence[float]) -> str:
    """Median, and the range behind it."""
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def row(name: str, budget: int, played: Played) -> str:
    rollouts = played.rollouts
    kept = sum(rollout.reward == 1.0 for rollout in rollouts)
    cells = (
        name,
        "one window" if budget == LONG else f"{budget:,}",
        f"{kept} of {len(rollouts)}",
        f"{statistics.mean(rollout.reward or 0.0 for rollout in rollouts):.3f}",
        spread([rollout.turns for rollout in rollouts]),
        spread([sum(len(window) for window in rollout.windows) for rollout in rollouts]),
        spread([rollout.compactions for rollout in rollouts]),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", type=int, default=8, metavar="N", help="of each size")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs" / "games.md", metavar="PAGE")
    options = parser.parse_args()
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    costs = []
    for name, size in SIZES.items():
        tasks = TextWorldTasks(settings={**size.settings, **SKILLS}, n_train=0, n_heldout=options.games)
        tasks.generate("heldout", range(options.games))
        for budget in (LONG, *size.budgets):
            played = play(tasks, budget, size.summary)
            lines.append(row(name, budget, played))
            print(lines[-1], flush=True)
        steps = sum(rollout.turns for rollout in played.rollouts)
        costs.append(f"{name}: {1000 * played.seconds / steps:.1f} ms")
    page = options.output.read_text()
    table = "\n".join([MARKS[0], *lines, "", f"A step, all included, 8 games at a time: {', '.join(costs)}.", MARKS[1]])
    options.output.write_text(re.sub(f"{MARKS[0]}.*{MARKS[1]}", lambda _: table, page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
