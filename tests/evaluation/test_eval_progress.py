"""What people see while they wait: on a terminal, and in a log."""

from io import StringIO

from rich.console import Console

from compactionrl.config import parse_config
from compactionrl.environments.notes import NotesTasks
from compactionrl.evaluation.evaluate import Evaluation, make_arms
from compactionrl.evaluation.progress import EvaluationProgress
from compactionrl.rollout.ledger import Rollout, Segment, Window


def evaluation() -> Evaluation:
    config = parse_config({"context": {"budget": 1000, "threshold": 300, "response_tokens": 300, "summary_tokens": 20}})
    tasks = NotesTasks(seed=1, notes=[5, 5], facts=2)
    return Evaluation(tasks, config, make_arms(config, ["x1", "x4"]), n_tasks=3, seed=0)


def done(arm: str, index: int, reward: float = 1.0) -> Rollout:
    window = Window()
    window.append_sampled([1] * 50, [-1.0] * 50, [0] * 50, Segment("execution", 0))
    return Rollout(f"{arm}-heldout-{index}", f"notes-heldout-{index}", [window], reward=reward, end="submitted")


def test_lines_in_a_log_come_now_and_then_and_at_the_end() -> None:
    measured, output, now = evaluation(), StringIO(), [100.0]
    measured.keep(done("x1", 0))  # from before
    console = Console(file=output, width=40)
    with EvaluationProgress(measured, label="base", console=console, clock=lambda: now[0]) as progress:
        for seconds, rollout in ((2.0, done("x4", 0)), (12.0, done("x1", 1, 0.0)), (13.0, done("x4", 1))):
            now[0] = 100.0 + seconds
            measured.keep(rollout)
            progress.ended_one(rollout)
        assert output.getvalue() == "base x1 2/3 (1 solved), x4 1/3 (1 solved); 8 tokens/s, 0:00:18 left\n"
        measured.tallies["x4"].broken[2] = broken = Rollout("x4-heldout-2", "notes-heldout-2", error="x")
        progress.ended_one(broken)
        now[0] = 120.0
        measured.keep(done("x1", 2))
        progress.ended_one(done("x1", 2))
    last = output.getvalue().splitlines()[-1]
    assert last == "base x1 3/3 (2 solved), x4 3/3 (2 solved, 1 broke down); 10 tokens/s, 0:00:00 left"


def test_bars_on_a_terminal() -> None:
    measured, output = evaluation(), StringIO()
    measured.keep(done("x1", 0))
    console = Console(file=output, width=120, force_terminal=True, color_system=None)
    with EvaluationProgress(measured, console=console) as progress:
        measured.keep(done("x4", 0, 0.5))
        progress.ended_one(done("x4", 0, 0.5))
    shown = output.getvalue().replace("\r", "\n").splitlines()
    assert any("x1" in line and "1/3" in line and "1 solved" in line for line in shown)
    assert any("x4" in line and "1/3" in line and "0 solved" in line for line in shown)


def test_nothing_to_do_shows_nothing() -> None:
    measured, output = evaluation(), StringIO()
    for arm in ("x1", "x4"):
        for index in range(3):
            measured.keep(done(arm, index))
    with EvaluationProgress(measured, console=Console(file=output, force_terminal=True)):
        pass
    assert "x1" not in output.getvalue()
