"""TextWorld (Microsoft, MIT licence): games generated from seeds, kept in a folder, split into train and held-out ones."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from compactionrl.environments.text_game import NO_COMMAND, TextGameEnvironment

SPLITS = ("train", "heldout")
SYSTEM = "You play a text game. Say one command at a time and nothing else. Commands begin with {verbs}, quit."
KINDS = {
    "cooking": ("tw_cooking.cooking", {"recipe": 3, "take": 3, "go": 6, "open": True, "cook": True, "cut": True}),
    "coin": ("tw_coin_collector.coin_collector", {"level": 5}),
    "treasure": ("tw_treasure_hunter.treasure_hunter", {"level": 5}),
}
"""Where a kind of games comes from, below `textworld.challenges`, and its settings where none are given."""

FURTHER = {"cooking": {"recipe": 1, "go": 1, "recipe_seed": 0, "split": None}, "coin": {}, "treasure": {}}
"""What the challenges' own command line adds to the settings."""

FOODS = {"train": {"split": "train"}, "heldout": {"split": "test"}}
"""TextWorld's own split of the cooking games: other foods, and other ways to prepare the same ones."""

OPENING = threading.Lock()
"""TextWorld's parser of game files serves one thread at a time."""

BANNER = re.compile(r"[\s$|_/\\>]*")
STATUS = re.compile(r"^>.*$", re.MULTILINE)


class MissingLibrary(ValueError):
    """What the games need is not installed: these tasks cannot be chosen here."""


@dataclass(frozen=True)
class GameFacts:
    """What is kept beside a generated game. `walkthrough` reaches `max_score`; `texts`: what the game says along it."""

    verbs: list[str]
    walkthrough: list[str]
    max_score: int
    texts: list[str]

    @property
    def content(self) -> str:
        """Identifies the game by what it says and asks for, whatever its seed."""
        return hashlib.sha256(json.dumps([self.walkthrough, self.texts]).encode()).hexdigest()


class TextWorldTasks:
    """A TaskSet of TextWorld games.

    game: "cooking" (find the recipe, gather, prepare, eat: a point each), "coin" (coin collector) or "treasure" (treasure
    hunter). settings: of that challenge, with TextWorld's names ({"recipe", "take", "go", "open", "cook", "cut"}; {"level"});
    they replace the default ones. foods: whether the held-out cooking games use TextWorld's own test foods and preparations
    ("own") or those of training ("shared"; the maps and recipes still differ). admissible: list the commands that would
    work behind every observation. folder: where games are kept; default: compactionrl/textworld in the user's cache.

    A game is generated, in processes of its own, when it is first played (seconds); the walkthrough is played then, and a
    game whose walkthrough does not reach its highest score is refused. Train games have even seeds, held-out ones odd.
    """

    def __init__(
        self,
        *,
        game: str = "cooking",
        settings: dict[str, Any] | None = None,
        foods: Literal["own", "shared"] = "own",
        n_train: int = 100,
        n_heldout: int = 50,
        seed: int = 0,
        admissible: bool = False,
        folder: str = "",
    ) -> None:
        if find_spec("textworld") is None:
            raise MissingLibrary("TextWorld is not installed: pip install 'compactionrl[games]'.")
        if game not in KINDS:
            raise ValueError(f"game must be one of {', '.join(KINDS)}, not {game!r}.")
        if foods not in ("own", "shared"):
            raise ValueError(f"foods must be 'own' or 'shared', not {foods!r}.")
        if min(n_train, n_heldout, seed) < 0:
            raise ValueError("n_train, n_heldout and seed must be 0 or more.")
        self.kind, self.settings = game, KINDS[game][1] if settings is None else settings
        self.foods, self.seed, self.admissible = foods, seed, admissible
        self._sizes = {"train": n_train, "heldout": n_heldout}
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = Path(folder) if folder else cache / "compactionrl" / "textworld"
        self.walkthroughs: dict[str, list[str]] = {}
        """Of every game that was started: the commands that win it, by the text of its task."""

    def size(self, split: str) -> int:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}.")
        return self._sizes[split]

    def task_id(self, split: str, index: int) -> str:
        if not 0 <= index < self.size(split):
            raise IndexError(f"There is no task {index} in {split!r}: it has {self.size(split)} tasks.")
        return f"textworld-{self.kind}-{split}-{index}"

    def environment(self, split: str, index: int) -> TextGameEnvironment:
        self.task_id(split, index)  # refuses an index that does not exist
        return TextGameEnvironment(lambda: self._open(split, index))

    def _open(self, split: str, index: int) -> TextWorldGame:
        [folder] = self.generate(split, [index])
        game = TextWorldGame(folder, self.admissible)
        self.walkthroughs[game.task] = game.facts.walkthrough
        return game

    def facts(self, split: str) -> list[GameFacts]:
        """Of all games of a split, generated where they are not yet there."""
        return [read_facts(folder) for folder in self.generate(split, range(self.size(split)))]

    @cached_property
    def texts(self) -> list[str]:
        """What the train games say and what is said to them: a tokenizer for a tiny policy is built from it."""
        games = self.facts("train")
        said = [text for facts in games for text in (*facts.texts, *facts.walkthrough, system(facts))]
        return [*dict.fromkeys(said), NO_COMMAND, "to do: nothing, quit"]

    def generate(self, split: str, indices: Iterable[int], processes: int = 1) -> list[Path]:
        """The folders of games; those that are missing are generated, `processes` at a time.

        Raises RuntimeError with what TextWorld said if one cannot be generated.
        """
        folders = {index: self._folder(split, index) for index in indices}
        missing = [index for index, folder in folders.items() if not (folder / "facts.json").exists()]
        shares = [missing[i::processes] for i in range(processes) if missing[i::processes]]
        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(lambda share: self._run_generator(split, share), shares))
        return list(folders.values())

    def _settings(self, split: str) -> dict[str, Any]:
        own_foods = self.kind == "cooking" and self.foods == "own"
        return {**FURTHER[self.kind], **self.settings, **(FOODS[split] if own_foods else {})}

    def _folder(self, split: str, index: int) -> Path:
        recipe = json.dumps([self.kind, self._settings(split), library_version()], sort_keys=True)
        return (
            self.folder
            / f"{self.kind}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
            / str(self._seed(split, index))
        )

    def _seed(self, split: str, index: int) -> int:
        return (self.seed * 1_000_000 + index) * 2 + (split == "heldout")

    def _run_generator(self, split: str, indices: Sequence[int]) -> None:
        order = {
            "kind": self.kind,
            "settings": self._settings(split),
            "games": [(self._seed(split, index), str(self._folder(split, index))) for index in indices],
        }
        run = subprocess.run(
            [sys.executable, "-m", "compactionrl.environments.textworld"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise RuntimeError(f"TextWorld could not generate a {self.kind} game:\n{run.stderr[-2000:]}")


def library_version() -> str:
    try:
        return version("textworld")
    except PackageNotFoundError:
        return "unknown"


class TextWorldGame:
    """A generated game, played by its own interpreter.

    Commands whose first word is none of the game's verbs never reach the interpreter: among them are saving to a file,
    starting anew and taking a move back.
    """

    def __init__(self, folder: Path, admissible: bool = False) -> None:
        import textworld

        self.facts, self.admissible = read_facts(folder), admissible
        # Of what the interpreter lacks for these games nothing is used.
        warnings.filterwarnings("ignore", "Game '.*' is not fully supported")
        infos = textworld.EnvInfos(feedback=True, score=True, won=True, lost=True, admissible_commands=admissible)
        with OPENING:
            self._player = textworld.start(str(folder / "game.z8"), infos)
        self._player.seed(1)  # the same answers every time
        self._state = self._player.reset()
        self.system, self.task = system(self.facts), self._said()

    def start(self) -> str:
        return self.task

    def step(self, command: str) -> tuple[str, bool]:
        words = command.lower().split()
        if not words or words[0] not in self.facts.verbs or "then" in words:  # "then" begins another command
            return f"Commands begin with {', '.join(self.facts.verbs)}.", False
        self._state, _, over = self._player.step(" ".join(words))
        return self._said(), bool(over)

    def _said(self) -> str:
        text = tidy(self._state["feedback"])
        return text + "\nCommands: " + ", ".join(self._state["admissible_commands"]) if self.admissible else text

    def score(self) -> float:
        return self._state["score"] / self.facts.max_score

    def interrupt(self) -> None:
        """Its commands take milliseconds."""

    def close(self) -> None:
        self._player.close()


def system(facts: GameFacts) -> str:
    return SYSTEM.format(verbs=", ".join(facts.verbs))


def tidy(feedback: str) -> str:
    """Without the banner, the status line behind the prompt, and blank lines."""
    lines = (line.strip() for line in STATUS.sub("", feedback).splitlines())
    return "\n".join(line for line in lines if not BANNER.fullmatch(line))


def read_facts(folder: Path) -> GameFacts:
    return GameFacts(**json.loads((folder / "facts.json").read_text()))


def generate(kind: str, settings: dict[str, Any], seed: int, folder: Path) -> None:
    """Generate and compile a game, play its walkthrough, and put it into `folder`, complete or not at all."""
    from importlib import import_module

    import textworld

    challenge = import_module(f"textworld.challenges.{KINDS[kind][0]}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        options = textworld.GameOptions()
        options.seeds, options.path = seed, f"{made}/game.z8"
        options.force_recompile = True
        game = challenge.make(settings, options)
        textworld.generator.compile_game(game, options)
        facts = GameFacts(game.verbs, list(game.walkthrough), game.max_score, [])
        record(facts, Path(made))
        try:
            os.rename(made, folder)
        except OSError:
            if not (folder / "facts.json").exists():  # made by another process meanwhile: the same game
                raise
        else:
            os.mkdir(made)  # for the context to remove


def record(facts: GameFacts, folder: Path) -> None:
    """Write facts.json, with what the game says along its walkthrough."""
    (folder / "facts.json").write_text(json.dumps(asdict(facts)))
    game = TextWorldGame(folder)
    facts.texts.append(game.start())
    for command in facts.walkthrough:
        text, _ = game.step(command)
        facts.texts.append(text)
    score = game.score()
    game.close()
    if score != 1:
        raise RuntimeError(f"the walkthrough {facts.walkthrough} reaches {score} of the highest score")
    (folder / "facts.json").write_text(json.dumps(asdict(facts)))


if __name__ == "__main__":
    order = json.load(sys.stdin)
    for seed, folder in order["games"]:
        generate(order["kind"], order["settings"], seed, Path(folder))
