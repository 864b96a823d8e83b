"""Progress: a live table on a terminal, lines elsewhere."""

from io import StringIO

from rich.console import Console

from compactionrl.training.progress import Progress

METRICS = {
    "rollout/reward": 0.25,
    "rollout/pass_at_1": 0.5,
    "rollout/compactions": 1.5,
    "speed/tokens_per_second": 1234.5,
}


def test_plain_lines_when_not_a_terminal() -> None:
    out = StringIO()
    with Progress(10, 2, Console(file=out, width=60)) as progress:
        progress.begin("after step-000001", 4)
        progress.rollout(None)
        progress.batch("step-000002", METRICS)
        progress.evaluation(2, {"x1": {"pass_at_1": None}, "x4": {"pass_at_1": 0.125}})
    first, second = out.getvalue().splitlines()
    assert first.startswith("step-000002: reward 0.250, Pass@1 50.0%, compactions 1.50, summary tokens –, entropy –")
    assert "tokens/s 1,23" in first
    assert first.endswith("left")
    assert second == "held-out after 2 steps: x1 –, x4 12.5%"
    assert "\x1b" not in out.getvalue()


def test_a_table_on_a_terminal() -> None:
    out = StringIO()
    with Progress(3, 0, Console(file=out, width=120, force_terminal=True)) as progress:
        progress.begin("after step-000001", 4)
        progress.rollout(None)
        progress.batch("step-000002", METRICS)
        progress.begin("after step-000002", 4)
        progress.rollout(None)
        with progress.console.capture() as capture:
            progress.console.print(progress.render())
    shown = capture.get()
    for text in ("Pass@1", "compactions", "step-000002", "50.0%", "after step-000002: 1/4 rollouts"):
        assert text in shown


def test_time_left_is_the_mean_batch_times_what_is_left() -> None:
    progress = Progress(4, 1, Console(file=StringIO()))
    assert progress.time_left() == "?"
    progress.durations.extend([10.0, 20.0])
    assert progress.time_left() == "0:00:45"
    progress.durations.extend([3685.0] * 10)
    assert progress.time_left() == "3:04:15"
