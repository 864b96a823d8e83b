"""The declared grid: settings times variants times seeds. A cell is one of them, with the configuration that it runs."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compactionrl.build import build_tasks
from compactionrl.config import Config, ConfigError, load_config, parse_config, put
from compactionrl.evaluation.modes import longest_window
from compactionrl.study.variants import BASE, FULL, UNTRAINED, VARIANTS, variant

Kind = Literal["base", "train", "swap", "perfect"]
SWAP, PERFECT = "swap", "perfect"
PACKAGED = Path(__file__).parent
OWN = {
    "run.folder": "use --runs",
    "run.seed": "use --seeds",
    "warm_start.seed": "use --seeds",
    "evaluation.tasks": "use --evaluation.final_tasks",
    "train.modes": "every arm has its own",
}
"""Keys that a study sets itself."""
EXTRA_SEEDS = 3
"""Extra variants run on so many of the seeds."""

QUICK: dict[str, Any] = {
    "warm_start.demonstrations": 32,
    "warm_start.epochs": 1,
    "warm_start.hidden_size": 32,
    "train.steps": 2,
    "train.rollouts_per_step": 8,
    "train.value_pretraining_steps": 1,
    "evaluation.final_tasks": 16,
}
"""A smoke version of any setting: everything runs, nothing is learned."""


@dataclass(frozen=True)
class Setting:
    """A task family, its context and its training recipe: what all cells of a comparison have in common."""

    name: str
    toml: str
    config: Config

    @property
    def windows(self) -> int:
        return self.config.context.max_compactions + 1

    def header(self) -> dict[str, Any]:
        """What the report says about it."""
        c = self.config
        return {
            "modes": list(c.evaluation.modes),
            "compacting": f"x{self.windows}",
            "long": f"{self.windows}C",
            "windows": self.windows,
            "budget": c.context.budget,
            "tasks": c.evaluation.final_tasks,
            "rollouts_per_step": c.train.rollouts_per_step,
            "steps": c.train.steps,
            "toml": self.toml,
            "config": c.model_dump(mode="json"),
        }


@dataclass(frozen=True)
class Cell:
    """One variant on one seed of one setting. Two names are no variants: "swap", its policies with each other's summaries,
    and "perfect", a scripted player that forgets nothing: what the tasks and the windows allow.
    """

    setting: Setting
    name: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.setting.name}/{self.name}/{self.seed}"

    @property
    def kind(self) -> Kind:
        kinds: dict[str, Kind] = {BASE: "base", SWAP: "swap", PERFECT: "perfect"}
        return kinds.get(self.name, "train")

    @property
    def needs(self) -> list[Cell]:
        """The cells whose policies this one starts from."""
        names = {"base": (), "train": (BASE,), "swap": (BASE, FULL, UNTRAINED), "perfect": (BASE,)}[self.kind]
        return [Cell(self.setting, name, self.seed) for name in names]

    def config(self, root: Path = Path("runs")) -> Config:
        """The resolved configuration, with its run in `root`. ConfigError if the variant cannot work in this setting."""
        data = self.setting.config.model_dump()
        changes = variant(self.name).changes(self.setting.windows) if self.kind == "train" else {}
        for key, value in {
            **changes,
            "model.path": "warm-start" if self.kind == "base" else str(self.policy_folder(root, BASE)),
            "run.folder": str(root / self.key),
            "run.seed": self.seed,
            "warm_start.seed": self.seed,
            # The result is the evaluation behind the last update, at its full size.
            "evaluation.tasks": self.setting.config.evaluation.final_tasks,
        }.items():
            put(data, key, value)
        try:
            config = parse_config(data)
            config.check_trainable()
            longest_window(config)  # refuses a mode that this context cannot do
            return config
        except ConfigError as error:
            raise ConfigError(f"{self.key}: {error}") from None

    def policy_folder(self, root: Path, name: str) -> Path:
        """Where the cell called `name`, of the same setting and seed, leaves its policy."""
        last = f"checkpoints/step-{self.setting.config.train.steps:06}/policy"
        return root / Cell(self.setting, name, self.seed).key / ("base" if name == BASE else last)

    @property
    def fingerprint(self) -> str:
        """Identifies what was run. Values that stand at their defaults are left out, so that a new key changes nothing."""
        data = self.config().model_dump(mode="json", exclude_defaults=True)
        del data["run"], data["model"]["path"]
        return hashlib.sha256(json.dumps([self.kind, data], sort_keys=True).encode()).hexdigest()[:16]


def load_setting(name: str, overrides: Mapping[str, Any], *, quick: bool = False) -> Setting:
    """A packaged setting by its name, or a TOML file by its path. ConfigError says why one cannot be studied."""
    path = PACKAGED / f"{name}.toml" if "/" not in name and not name.endswith(".toml") else Path(name)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in PACKAGED.glob("*.toml")))
        raise ConfigError(f"--setting {name}: choose one of {known}, or give the path of a TOML file")
    for key in OWN.keys() & overrides.keys():
        raise ConfigError(f"--{key}: a study sets this itself; {OWN[key]}")
    config = load_config(path, {**(QUICK if quick else {}), **overrides})
    compacting = f"x{config.context.max_compactions + 1}"
    if config.model.path != "warm-start":
        raise ConfigError(f"{path}: model.path must be 'warm-start': every seed of a study has a base of its own")
    if not config.train.steps:
        raise ConfigError(f"{path}: train.steps must be 1 or more: what is compared are trained policies")
    if config.train.modes:
        raise ConfigError(f"{path}: train.modes must be left out: every arm of a study has its own")
    if not config.context.max_compactions:
        raise ConfigError(f"{path}: context.max_compactions must be 1 or more: the study is about compaction")
    if not {"x1", compacting} <= set(config.evaluation.modes):
        raise ConfigError(
            f"{path}: evaluation.modes must hold x1 and {compacting} (context.max_compactions + 1 windows)"
        )
    if "long" in config.evaluation.modes:
        raise ConfigError(f"{path}: evaluation.modes: say how long a window is, such as 4C, in place of long")
    if (size := build_tasks(config).size("heldout")) < (wanted := config.evaluation.final_tasks):
        raise ConfigError(f"{path}: evaluation.final_tasks is {wanted}, but there are {size} held-out tasks")
    text = path.read_text()
    if changed := {**(QUICK if quick else {}), **overrides}:
        lines = "\n".join(f"# {key} = {json.dumps(value)}" for key, value in changed.items())
        text = f"{text.rstrip()}\n\n# Changed on the command line:\n{lines}\n"
    tomllib.loads(text)
    return Setting(path.stem, text, config)


def grid(settings: Sequence[Setting], seeds: int, *, extra: bool) -> list[Cell]:
    """All cells, in the order in which they are run: the paper's arms first, and seed by seed."""

    def cells(names: Sequence[str], count: int) -> Iterator[Cell]:
        for setting in settings:
            for seed in range(1, count + 1):
                yield from (Cell(setting, name, seed) for name in names)

    perfect = [Cell(setting, PERFECT, 1) for setting in settings]  # the same for all seeds
    paper = [one.name for one in VARIANTS if not one.extra]
    # The three policies that a swap needs, then the swap, then the others.
    order = [BASE, FULL, UNTRAINED, SWAP, *(name for name in paper if name not in (BASE, FULL, UNTRAINED))]
    extras = [one.name for one in VARIANTS if one.extra] if extra else []
    return [*cells(order, seeds), *perfect, *cells(extras, min(seeds, EXTRA_SEEDS))]


def check(cells: Sequence[Cell]) -> None:
    """ConfigError for a cell that cannot work, and for two that are the same: comparing them would say nothing."""
    keys: set[str] = set()
    runs: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        cell.config()
        if cell.key in keys:
            raise ConfigError(f"--setting: two files are called {cell.setting.name}.toml; rename one of them")
        keys.add(cell.key)
        other = runs.setdefault((cell.setting.name, cell.fingerprint), cell)
        if other is not cell:
            raise ConfigError(
                f"{other.key} and {cell.key} would be the same run: "
                f"the setting {cell.setting.name} leaves no difference between these arms"
            )
