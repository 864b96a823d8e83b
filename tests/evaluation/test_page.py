"""The report says what the record says, and everything in it is text."""

from typing import Any

from compactionrl.config import parse_config
from compactionrl.environments.notes import NotesTasks
from compactionrl.evaluation.evaluate import OWN, Evaluation, make_arms
from compactionrl.evaluation.page import page
from compactionrl.rollout.ledger import Rollout, Segment, Window


def done(name: str, task: str, reward: float) -> Rollout:
    window = Window()
    window.append_context([1] * 10, "user", "task")
    window.append_sampled([1] * 5, [-1.0] * 5, [0] * 5, Segment("execution", 0))
    return Rollout(name, task, [window], reward=reward, end="submitted", turns=1, tool_calls=1)


def record(**about: Any) -> dict[str, Any]:
    """x1 solves none of two tasks in two runs, x4 both in the first run and none in the second; another summariser one."""
    config = parse_config({"context": {"budget": 1000, "threshold": 300, "response_tokens": 300, "summary_tokens": 20}})
    arms = make_arms(config, ["x1", "x4"], [OWN, "glm"])
    measured = Evaluation(NotesTasks(seed=1, notes=[5, 5], facts=2), config, arms, n_tasks=2, seed=0, runs=2)
    solved = {"x1": "00 00", "x4": "11 00", "x4+glm": "10 0"}
    for arm, outcomes in solved.items():
        for run, tasks in enumerate(outcomes.split(), 1):
            for index, outcome in enumerate(tasks):
                name = f"{arm}-heldout-{index}" + ("-run2" if run == 2 else "")
                measured.keep(done(name, f"notes-heldout-{index}", float(outcome)))
    results = {name: {**result, "cost": None} for name, result in measured.results().items()}
    difference = {
        "arm": "x4",
        "minus": "x1",
        "compacted": False,
        "difference": 0.5,
        "low": -0.01,
        "high": 0.9,
        "tasks": 2,
    }
    unknown = {**difference, "compacted": True, "difference": None}
    described = {"agent": "glm-5", "sampler": "http://127.0.0.1:8000, vllm", "exact": True, "summarisers": {}}
    described |= {"tasks": "own:Tasks", "n_tasks": 2, "runs": 2, "budget": 65536}
    return {"about": described | about, "missing": 1, "arms": results, "differences": [difference, unknown]}


def rows(text: str, title: str) -> dict[str, list[str]]:
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {line[0]: line[1:] for line in lines}


def test_every_table_says_what_was_measured() -> None:
    text = page(record())
    assert rows(text, "Pass@1")["x1"] == ["0.0 (0.0–65.8)", "0.0", "0.0", "4", "0"]  # as 0 of 2: the runs agree
    assert rows(text, "Pass@1")["x4"][1:] == ["100.0", "0.0", "4", "0"]
    assert rows(text, "Pass@1")["x4+glm"][1:] == ["50.0", "0.0", "3", "0"]
    assert rows(text, "Differences")["x4 − x1"] == ["+50.0 (−1.0 to +90.0)", "2"]
    assert "x4 − x1 (tasks that compacted)" not in text  # there is none
    assert rows(text, "Behaviour")["tool calls"] == ["1.00"] * 3
    assert rows(text, "Tokens")["x4"] == ["4", "40", "40", "20", "0"]
    assert "1 rollouts are missing" in text
    assert "C = 65,536 tokens" in text
    assert "approximate" not in text
    assert "cost" not in text


def test_cost_stands_there_if_there_are_prices() -> None:
    found = record()
    for result in found["arms"].values():
        result["cost"] = 12.345
    assert rows(page(found), "Tokens")["x4"] == ["4", "40", "40", "20", "0", "12.35"]


def test_what_is_approximate_says_so() -> None:
    text = page(record(exact=False, summarisers={"glm": "glm-5 at http://b, from text"}))
    assert "**Budgets are approximate**" in text
    assert "Summaries by `glm`: glm-5 at http://b, from text." in text


def test_hostile_names_are_text() -> None:
    found = record(agent="x](http://evil) <script>\x1b[2J", summarisers={"`|`": "a|b\n# c"})
    found["arms"]["x4"]["error_causes"] = {"OSError: <img> | \x1b]0;t\x07 **b**": 3}
    text = page(found)
    assert not set(text) & set("\x1b\x07")
    assert "<script>" not in text.replace(r"\<script", "")
    assert r"3 × OSError: \<img> \| \\u001b\]0;t\\u0007 \*\*b\*\*" in text
    assert "\n# c" not in text
