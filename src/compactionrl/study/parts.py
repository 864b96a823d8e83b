"""The parts of a setting's section in the report, and the report's fixed texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from compactionrl.study.arms import Ledger
from compactionrl.study.tables import (
    ablation_table,
    behaviour_table,
    difference_table,
    pass_table,
    seed_table,
    swap_seed_table,
    swap_table,
)
from compactionrl.study.training_tables import cost_table, credit_table, growth_table, training_table
from compactionrl.study.verdicts import question_table, verdict_table


class Part(NamedTuple):
    """A heading of a setting's section, and what stands under it."""

    title: str
    text: str
    tables: tuple[Callable[[Ledger, str], str], ...]
    figures: Mapping[str, str] = {}
    """Name -> caption."""
    about: str = "any"
    """The kind of cells without which it is left out, see `finished_kinds`."""


ROWS = "Filled: mean over seeds. Rings: every seed. Diamonds: arms beyond the paper."
BAND = "Lines: mean over seeds. Bands: from the lowest to the highest seed."
PARTS = (
    Part("The paper's orderings", "The verdicts above with the differences behind them.", (verdict_table,)),
    Part(
        "Pass@1 (Tables 2 and 3 in kind)",
        "x1: one window of C, compaction off. xN: up to N - 1 compactions. 2C: one window of 2C, compaction off. The "
        "perfect player is a script that forgets nothing, in the same windows: what it reaches is about the most that a "
        "policy can reach in that mode, and it bounds every gain. Where it reaches little, arms cannot differ much; where it "
        "reaches more with compaction than without, that policies gain from compaction follows from how the tasks are made.",
        (pass_table, difference_table),
        {
            "pass": f"Pass@1 in every mode. {ROWS} Bars: 95% intervals. Dotted, where it has played: the perfect player.",
            "differences": "Paired differences to the full method, in the compacting mode, on the seeds that both have. "
            f"{ROWS} Bars: 95% intervals.",
        },
    ),
    Part(
        "Who writes the summaries (Table 1 in kind)",
        "A policy acts in the compacting mode, and another one writes its summaries. *perfect* and *empty* are scripted: "
        "all facts in view, or none.",
        (swap_table, swap_seed_table),
        about="swap",
    ),
    Part("The method's two parts (Table 4 in kind)", "In the compacting mode.", (ablation_table,), about="trained"),
    Part(
        "What the rollouts do (Figure 3 in kind)",
        "Measured in the compacting mode, after training.",
        (behaviour_table,),
        {"behaviour": f"Compactions, tool calls, and Pass@1 of the tasks that compacted. {ROWS}"},
    ),
    Part(
        "How training goes (Figure 4 in kind)",
        "From the batches that are trained on, each arm in the modes that it is trained in: compare heights with care.",
        (training_table, growth_table),
        {
            "dynamics": f"Lengths and entropy (of the optimised tokens) over training. {BAND}",
            "reward": f"Reward over training. {BAND} Dashed: arms beyond the paper.",
        },
        about="trained",
    ),
    Part(
        "Credit and critic",
        "How much of the credit summaries get, and how well the critic knows each segment.",
        (credit_table,),
        {"credit": f"Credit of the summaries and the critic's explained variance. {BAND}"},
        about="trained",
    ),
    Part(
        "Beyond the paper",
        "Questions that the paper leaves open. Whether drawing compaction on or off costs at most 2 points in x1 is a weak test "
        "where CompactionRL itself costs no more: see that comparison among the orderings.",
        (question_table,),
        about="extra",
    ),
    Part("Every seed", "Pass@1 in %.", (seed_table,)),
    Part("What it costs", "Wall-clock time counts neighbours on the same machine.", (cost_table,)),
)
"""A setting's section."""

VERDICTS = (
    "All pairs of arms in the paper's tables, each in the direction that most of the paper's columns (models and benchmarks) "
    "show, or where as many show the other, its mean; with the paper's own mean difference in points and in how many of its "
    "columns it goes this way. Those that all columns agree on are the paper's consistent orderings and stand first; the "
    "others are mixed in the paper itself. *holds*: the 95% interval of the paired difference lies above 0; "
    "*does not hold*: it lies below 0, so the opposite is seen here; *undecided*: it contains 0, which shows neither a "
    "difference nor that there is none. The differences stand in each setting's section."
)
STATISTICS = """\
Every policy of a setting meets the same held-out tasks, so policies are compared task by task and seed by seed: the
difference of two arms is the mean over seeds of the mean difference over tasks that both finished.

Seeds and tasks are both samples. The intervals come from the crossed bootstrap: seeds and tasks are resampled
independently of each other, 10,000 times, and the interval holds the middle 95% of what comes out. It counts the noise of
single rollouts more than once, so it tends to be too wide where that noise dominates; over a handful of seeds that differ
much it is too narrow, as any percentile bootstrap is. That is why a t interval over the seeds' own differences stands
beside it. It takes the tasks and their random streams as given and needs no resampling; where the two disagree (†), the
verdict is not safe.

No interval is corrected for multiple comparisons. Among many orderings some are decided by chance alone: less than one in
twenty of those without a difference where seeds differ little, more where they differ much, as
`tests/study/test_bootstrap.py` simulates for single means."""
LIMITS = """\
- The packaged tasks are generated and ask for remembering and little else. Real agents also search, write code and err in
  ways that are not possible here.
- The policies are tiny and were taught the tasks' format by a warm start. What a large model brings along, they lack, so
  sizes of effects do not carry over; orderings may not either.
- Seeds are few. An effect smaller than the intervals may exist and not be seen.
- Learning rates and the like are shared by all arms and not tuned for each. An arm might do better with its own."""
