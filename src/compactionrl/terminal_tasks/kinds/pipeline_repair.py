"""Pipeline repair: stages that do not do what their sheets say, and a run that stops at the first one that is wrong.

To be carried over: the rates in force (circulars replace circulars, some are annulled) and which stages are right.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from compactionrl.environments.logbook import Draws
from compactionrl.terminal_tasks.task import Draft
from compactionrl.terminal_tasks.words import TOWNS, among, chatter, date

SIZES = {"easy": (6, 5), "medium": (12, 9), "hard": (22, 17)}
"""Stages, and how many of them are wrong."""

Values = list[int]


@dataclass(frozen=True)
class Operation:
    """What a stage can do. `sheet` says it, with {rate} for a rate's name; `right`, `wrong`: bodies with {n} for its value."""

    sheet: str
    right: str
    wrong: tuple[str, ...]
    low: int
    high: int

    def apply(self, values: Values, value: int) -> Values:
        """What the right body returns. (The texts are those below; nothing else is evaluated.)"""
        results: Values = eval(self.right.format(n=value), {"values": values})
        return results


OPERATIONS = (
    Operation(
        "Every value is multiplied by the {rate}; what exceeds 9999 then is taken modulo 10000.",
        "[value * {n} % 10000 for value in values]",
        ("[value * {n} % 9999 for value in values]", "[value * ({n} + 1) % 10000 for value in values]"),
        103, 997,
    ),
    Operation(
        "Values below the {rate} are left out; a value that equals it stays.",
        "[value for value in values if value >= {n}]",
        ("[value for value in values if value > {n}]", "[value for value in values if value < {n}]"),
        20, 90,
    ),
    Operation(
        "Of every group of as many neighbours as the {rate} says the first is left out.",
        "[value for at, value in enumerate(values) if at % {n}]",
        (
            "[value for at, value in enumerate(values) if (at + 1) % {n}]",
            "[value for at, value in enumerate(values) if not at % {n}]",
        ),
        3, 11,
    ),
    Operation(
        "Every value is replaced by the sum of itself and the values before it, as many in all as the {rate} says.",
        "[sum(values[max(0, at - {n} + 1) : at + 1]) for at in range(len(values))]",
        (
            "[sum(values[max(0, at - {n}) : at + 1]) for at in range(len(values))]",
            "[sum(values[at : at + {n}]) for at in range(len(values))]",
        ),
        2, 9,
    ),
    Operation(
        "In every group of as many neighbours as the {rate} says the values are sorted, the largest first.",
        "[value for at in range(0, len(values), {n}) for value in sorted(values[at : at + {n}], reverse=True)]",
        (
            "[value for at in range(0, len(values), {n}) for value in sorted(values[at : at + {n}])]",
            "[value for at in range(0, len(values), {n}) for value in reversed(values[at : at + {n}])]",
        ),
        3, 12,
    ),
    Operation(
        "The list is turned to the left by as many places as the {rate} says: what leaves at the front comes back at the end.",
        "[values[(at + {n}) % len(values)] for at in range(len(values))]",
        (
            "[values[(at - {n}) % len(values)] for at in range(len(values))]",
            "values[{n}:]",
        ),
        2, 25,
    ),
    Operation(
        "Every value is lowered by the one that stands as many places before it as the {rate} says; the first ones stay.",
        "[value - values[at - {n}] if at >= {n} else value for at, value in enumerate(values)]",
        (
            "[value - values[at - {n}] for at, value in enumerate(values)]",
            "[values[at - {n}] - value if at >= {n} else value for at, value in enumerate(values)]",
        ),
        2, 9,
    ),
    Operation(
        "To every value the {rate} is added as often as the value's place in the list says; the first place is 1.",
        "[value + {n} * (at + 1) for at, value in enumerate(values)]",
        (
            "[value + {n} * at for at, value in enumerate(values)]",
            "[value + {n} for at, value in enumerate(values)]",
        ),
        3, 60,
    ),
)  # fmt: skip
RATES = (
    "quay rate", "lamp rate", "tide rate", "rope rate", "salt rate", "pilot rate", "crane rate", "berth rate", "ballast rate",
    "anchor rate", "mail rate", "toll rate", "dock rate", "coal rate", "mast rate", "keel rate", "sail rate", "net rate",
    "buoy rate",
    "chart rate", "ferry rate", "grain rate", "hull rate", "store rate",
)  # fmt: skip
RUN = '''\
"""python3 run.py: every stage on its sample; stops at the first stage that is wrong."""

import hashlib
import importlib
import json
from pathlib import Path

here = Path(__file__).parent
for sample in sorted(here.glob("samples/*.json")):
    given = json.loads(sample.read_text())
    values = importlib.import_module(f"stages.{sample.stem}").run(list(given["values"]))
    if hashlib.sha256(json.dumps(values).encode()).hexdigest() != given["sha256"]:
        raise SystemExit(f"{sample.stem}: its result is wrong. See sheets/{sample.stem}.txt")
    print(f"{sample.stem}: right")
'''


@dataclass(frozen=True)
class Stage:
    """`value`: of its rate, as it is in force. `stale`: what the rate was before, or would be if an annulled circular counted."""

    name: str
    operation: Operation
    rate: str
    value: int
    stale: int
    broken: bool


def make(grade: str, draws: Draws) -> Draft:
    count, broken = SIZES[grade]
    rates, wrong = draws.sample(RATES, count), set(draws.sample(range(count), broken))
    stages = []
    for n, rate in enumerate(rates):
        operation = draws.choice(OPERATIONS)
        value = draws.between(operation.low, operation.high)
        # Two apart at least: some wrong bodies are the right ones for a rate that is off by one.
        stale = draws.choice([n for n in range(operation.low, operation.high + 1) if abs(n - value) > 1])
        stages.append(Stage(f"stage_{n + 1:02}", operation, rate, value, stale, n in wrong))
    texts = {stage.name: _code(draws, stage) for stage in stages}
    hidden = {stage.name: [_inputs(draws) for _ in range(2)] for stage in stages}
    return Draft(
        instruction=INSTRUCTION,
        files={
            "run.py": RUN,
            "stages/__init__.py": "",
            **{f"stages/{stage.name}.py": texts[stage.name] for stage in stages},
            **{f"samples/{stage.name}.json": _sample(draws, stage) for stage in stages},
            **{f"sheets/{stage.name}.txt": _sheet(draws, stage) for stage in stages},
            **_circulars(draws, stages),
        },
        expected={
            "broken": [stage.name for stage in stages if stage.broken],
            "inputs": hidden,
            "results": {s.name: [digest(s.operation.apply(each, s.value)) for each in hidden[s.name]] for s in stages},
        },
        solve="pipeline_repair",
        verify="pipeline_repair",
        solution={f"bodies/{n}.txt": f"{each.sheet}\n{each.right}\n" for n, each in enumerate(OPERATIONS)},
    )


def digest(values: Values) -> str:
    return hashlib.sha256(f"[{', '.join(map(str, values))}]".encode()).hexdigest()


def _inputs(draws: Draws) -> Values:
    """Every number that there may be, for every slip to show, and as many others."""
    return draws.sample([*range(1, 100), *(draws.between(1, 99) for _ in range(151))])


def _sample(draws: Draws, stage: Stage) -> str:
    values = _inputs(draws)
    right = digest(stage.operation.apply(values, stage.value))
    return f'{{"values": {values}, "sha256": "{right}"}}\n'


def _code(draws: Draws, stage: Stage) -> str:
    """The stage as it is: right, or with a wrong body, a stale rate, or both."""
    body, rate = stage.operation.right, stage.value
    if stage.broken:
        fault = draws.between(0, 2)
        body = draws.choice(stage.operation.wrong) if fault else body
        rate = stage.stale if fault != 1 else rate
    constant = stage.rate.upper().replace(" ", "_")
    remarks = "\n".join(f"    # {each}" for each in chatter(draws, 6))
    return (
        f'"""{stage.name}; see its sheet."""\n\n{constant} = {rate}\n\n\ndef run(values: list[int]) -> list[int]:\n{remarks}\n'
        f"    return {body.format(n=constant)}\n"
    )


def _sheet(draws: Draws, stage: Stage) -> str:
    return f"Sheet of {stage.name}\n\n" + among(draws, [stage.operation.sheet.format(rate=stage.rate)], 9)


def _circulars(draws: Draws, stages: list[Stage]) -> dict[str, str]:
    """Of every rate: the value in force, and an older one or a later one that was annulled. Numbers do not follow days."""
    numbers = draws.sample(range(11, 11 + 6 * len(stages)))
    files = {}

    def add(day: int, sentence: str) -> int:
        number = numbers.pop()
        head = f"Circular {number}, {date(day)}, to all offices in {draws.choice(TOWNS)}\n\n"
        files[f"circulars/{number:03}.txt"] = head + among(draws, [sentence], 6)
        return number

    for stage in stages:
        first, second, third = sorted(draws.sample(range(365), 3))
        if draws.random() < 0.5:
            add(first, f"The {stage.rate} is {stage.stale}.")
            add(second, f"From today on the {stage.rate} is {stage.value}.")
        else:
            add(first, f"The {stage.rate} is {stage.value}.")
            number = add(second, f"From today on the {stage.rate} is {stage.stale}.")
            add(third, f"Circular {number} is annulled, as if it had never been sent.")
    return files


INSTRUCTION = """\
# Mend the pipeline

`/app/stages` holds the stages of a pipeline. Some of them do not do what their sheets in `/app/sheets` say. The
sheets speak of rates; what a rate is was told in `/app/circulars`. The latest circular about a rate counts, by its
date, unless it was annulled. `cd /app && python3 run.py` tries the stages one after another on samples and stops at
the first one that is wrong.

Mend the stages: `run(values)` of each is to return what its sheet says, for any list of 100 to 1000 whole numbers
from 1 to 99. Each stage is tried by itself, on other lists. What counts is the share of wrong stages that are right
at the end, less the right ones that were spoiled.
"""
