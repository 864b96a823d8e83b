"""Text games behind the Environment protocol: a blocking game in a thread of its own, and a sampler that plays walkthroughs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from compactionrl.config import RETRY_REQUEST, SUMMARY_REQUEST
from compactionrl.environments.demonstrator import TURN, Codec
from compactionrl.environments.own_thread import OwnThread
from compactionrl.environments.protocol import Message, Observation, Response, Verdict
from compactionrl.samplers.protocol import Sampled

LONGEST = 200
COMMAND = re.compile(rf"[\w' -]{{1,{LONGEST}}}", re.ASCII)
NO_COMMAND = f"Say one command and nothing else: words on one line, without punctuation, {LONGEST} characters at most."
QUIT = "quit"
PLAN = re.compile(r"to do: ([^\n]*)")
NOTHING = "nothing"


class Game(Protocol):
    """One game, played once. Its methods may block; they are called one at a time, from one thread."""

    system: str
    """What the player is told before the game: how to play."""

    def start(self) -> str:
        """The first observation, the objective included."""
        ...

    def step(self, command: str) -> tuple[str, bool]:
        """What the game answers, and whether it is over."""
        ...

    def score(self) -> float:
        """The score so far, as a share of the highest: 0 to 1."""
        ...

    def interrupt(self) -> None:
        """End a call that may be running. Comes from another thread, before `close`."""
        ...

    def close(self) -> None: ...


class TextGameEnvironment:
    """An Environment: one text game, in a thread of its own, so that the event loop goes on meanwhile.

    A response is one command. Whatever is not (several lines, punctuation, too long) is answered and costs a turn, as does
    a command that the game does not understand. `quit` ends the game with the score reached. The reward is that score.
    """

    def __init__(self, open_game: Callable[[], Game]) -> None:
        self._open = open_game
        self._thread = OwnThread()
        self._game: Game | None = None
        self.commands = 0
        self.over = False

    async def start(self) -> list[Message]:
        first = await self._thread.call(self._begin)
        return [{"role": "system", "content": self.game.system}, {"role": "user", "content": first}]

    def _begin(self) -> str:
        self._game = self._open()
        return self._game.start()

    @property
    def game(self) -> Game:
        if self._game is None:
            raise RuntimeError("The game has not been started: await start() first.")
        return self._game

    async def step(self, response: Response) -> Observation:
        if self.over:
            raise RuntimeError("The game is over, no step may follow. Start a new environment.")
        command = response.text.strip()
        if not COMMAND.fullmatch(command):
            return Observation(NO_COMMAND)
        self.commands += 1
        if command.lower() == QUIT:
            self.over = True
            return Observation("", done=True)
        text, self.over = await self._thread.call(self.game.step, command)
        return Observation(text, done=self.over)

    async def verify(self) -> Verdict:
        """Final score / highest score."""
        score = await self._thread.call(self.game.score)
        return Verdict(score, {"score": score, "commands": self.commands, "game over": self.over})

    async def close(self) -> None:
        """Ends what the game holds, behind a start or a step that may still be running."""
        try:
            if self._game is not None:
                self._game.interrupt()
            await self._thread.call(self._end)
        finally:
            self._thread.close()

    def _end(self) -> None:
        if self._game is not None:
            self._game.close()


class Walkthroughs(Protocol):
    """A task family that knows how its games are won."""

    walkthroughs: Mapping[str, Sequence[str]]
    """The commands that win a game, by the text of its task; of every game that was started."""


class WalkthroughDemonstrator:
    """Plays walkthroughs, as a Sampler: what is still to be done it reads in the prompt, in plain ChatML turns.

    The task's text names the game. Asked for a summary (the last user turn is one of `summary_requests`), it writes
    "to do: " and the commands that are left, each dropped with probability `forget`; behind a compaction it has only that
    summary to go by. Only how many commands were said since is counted, by the rollout's name. A plan that is at its end is
    followed by `quit`. Log-probabilities are 0.0 and the policy version is 0: nothing was sampled.
    """

    def __init__(
        self,
        tasks: Walkthroughs,
        tokenizer: Codec,
        *,
        forget: float = 0.0,
        seed: int = 0,
        summary_requests: Sequence[str] = (SUMMARY_REQUEST, RETRY_REQUEST),
    ) -> None:
        if not 0 <= forget <= 1:
            raise ValueError(f"forget is a probability from 0 to 1, not {forget!r}.")
        self.tasks, self.tokenizer, self.forget, self.seed = tasks, tokenizer, forget, seed
        self.summary_requests = frozenset(request.strip() for request in summary_requests)
        self._followed: dict[str, tuple[list[str], int]] = {}

    async def sample(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        temperature: float,
        top_p: float,
        seed: int,
        affinity: str,
    ) -> Sampled:
        """The next command or a summary, closed by the first stop token. ValueError if no plan is in view."""
        reply = self.reply(self.tokenizer.decode(token_ids), affinity, seed)
        ids = [*self.tokenizer.encode(reply, add_special_tokens=False), stop_token_ids[0]]
        kept = ids[:max_tokens]
        return Sampled(kept, [0.0] * len(kept), "stop" if kept == ids else "length", [0] * len(kept))

    async def release(self, affinity: str) -> None:
        self._followed.pop(affinity, None)

    def reply(self, prompt: str, affinity: str, seed: int = 0) -> str:
        """What comes next in the rollout `affinity`; `seed` decides, with its own, what a summary forgets."""
        turns = [content.strip() for role, content in TURN.findall(prompt) if role == "user"]
        plan = self._plan(turns)
        followed, said = self._followed.get(affinity, (plan, 0))
        if followed != plan:
            said = 0  # a new window, with a new summary
        left = plan[said:]
        if turns[-1] in self.summary_requests:
            chance = random.Random(f"{self.seed}/{seed}")
            return "to do: " + (", ".join(step for step in left if chance.random() >= self.forget) or NOTHING)
        self._followed[affinity] = plan, said + 1
        return left[0] if left else QUIT

    def _plan(self, turns: Sequence[str]) -> list[str]:
        """The commands of the summary in view; without one, the walkthrough of the task in view."""
        for turn in turns:
            if match := PLAN.search(turn):
                return [] if match[1].strip() == NOTHING else match[1].strip().split(", ")
            if turn in self.tasks.walkthroughs:
                return list(self.tasks.walkthroughs[turn])
        raise ValueError("The prompt shows neither a summary nor the task of a game that was started.")
