"""Tokens of every request, counted by hand from a small ledger."""

from compactionrl.evaluation.usage import Usage, cost, usage
from compactionrl.rollout.ledger import Attempt, Rollout, Segment, Window
from compactionrl.samplers.protocol import Reported


def rollout() -> Rollout:
    """Two responses and a summary, which two rejected ones precede, then a window with a copied step and one response."""
    first, acting = Window(), Segment("execution", 0)
    first.append_context([9] * 10, "user", "task")
    first.append_sampled([1] * 4, [-1.0] * 4, [0] * 4, acting)  # request of 10
    first.append_context([9] * 6, "user")
    first.append_sampled([1] * 5, [-1.0] * 5, [0] * 5, acting)  # request of 20, of which 14 were there
    first.append_context([], "user", "placeholder")
    first.append_context([9] * 3, "user", "summary request")
    first.append_sampled([2] * 7, [-1.0] * 7, [0] * 7, Segment("summary", 1), "summary")  # request of 28, 25 were there
    first.rejected += [Attempt([3] * 2, [-1.0] * 2, "empty"), Attempt([3] * 8, [-1.0] * 8, "cut")]
    second = Window()
    second.append_context([9] * 12, "user", "resume")
    second.append_context([1] * 5, "assistant", "tail")
    second.append_context([9] * 4, "user", "tail")
    second.append_sampled([1] * 1, [-1.0], [0], Segment("execution", 2))  # request of 21, all of it new
    return Rollout("r", "t", [first, second], end="submitted")


def test_every_request_is_counted() -> None:
    assert usage(rollout()) == {
        "execution": Usage(requests=3, prompt=10 + 20 + 21, new=10 + 6 + 21, sampled=4 + 5 + 1),
        "summary": Usage(requests=3, prompt=3 * 28, new=3 * 3, sampled=7 + 2 + 8),
    }
    assert (
        usage(rollout())["execution"].sampled + usage(rollout())["summary"].sampled
        == rollout().token_counts()["sampled"]
    )


def test_a_servers_own_count_is_better_than_ours() -> None:
    """An endpoint that takes text: ids are pieces of it, more than there are tokens."""
    window, acting = Window(), Segment("execution", 0)
    window.append_context([9] * 100, "user", "task")
    window.append_sampled([1] * 40, [0.0] * 40, [0] * 40, acting, "", Reported(prompt=60, completion=30, hidden=5))
    window.append_context([9] * 10, "user")
    window.append_sampled([1] * 8, [0.0] * 8, [0] * 8, acting, "", Reported(prompt=92, completion=6))
    window.append_context([9] * 5, "user", "summary request")
    window.rejected.append(Attempt([1] * 9, [0.0] * 9, "empty", Reported(prompt=103, completion=4)))
    summary = Segment("summary", 1)
    window.append_sampled([1] * 7, [0.0] * 7, [0] * 7, summary, "summary", Reported(prompt=104, completion=5))
    assert usage(Rollout("r", "t", [window])) == {
        # The second request: 85 tokens were there before, 60 and those 25 of the 30 that the server shows.
        "execution": Usage(requests=2, prompt=60 + 92, new=60 + 7, sampled=30 + 6),
        "summary": Usage(requests=2, prompt=103 + 104, new=5 + 6, sampled=4 + 5),
    }


def test_nothing_was_asked() -> None:
    assert usage(Rollout("r", "t")) == {"execution": Usage(), "summary": Usage()}


def test_cost_is_of_a_million_tokens() -> None:
    tokens = {"responses": {"prompt": 3_000_000, "sampled": 100_000}, "summaries": {"prompt": 1_000_000, "sampled": 0}}
    assert cost(tokens, 0.5, 10.0, own=True) == 3 * 0.5 + 0.1 * 10 + 0.5
    assert cost(tokens, 0.5, 10.0, own=False) == 3 * 0.5 + 0.1 * 10  # another's summaries have another price
    assert cost(tokens, 0.0, 10.0, own=True) == 1.0
    assert cost(tokens, 0.0, 0.0, own=True) is None


def test_a_hand_offs_answers_are_asked_for_once() -> None:
    """A window may have two summary turns; what was rejected was asked for where the first one was."""
    window, summary = Window(), Segment("summary", 0)
    window.append_context([9] * 10, "user", "summary request")
    window.append_sampled([2] * 4, [-1.0] * 4, [0] * 4, summary, "summary")
    window.append_context([9] * 6, "user", "questions")
    window.append_sampled([2] * 5, [-1.0] * 5, [0] * 5, summary, "answers")
    window.rejected.append(Attempt([3] * 2, [-1.0] * 2, "empty"))
    assert usage(Rollout("r", "t", [window], end="submitted"))["summary"] == Usage(
        requests=3, prompt=10 + 10 + 20, new=10 + 10 + 6, sampled=2 + 4 + 5
    )
