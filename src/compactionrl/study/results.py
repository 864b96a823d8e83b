"""study.json: every finished cell of a study, task by task. The report is a function of it alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from compactionrl.config import ConfigError
from compactionrl.study.grid import Cell, Setting
from compactionrl.study.variants import BASE, VARIANTS
from compactionrl.training.atomic import write_file
from compactionrl.training.run_folder import flat

FORMAT = 1
EMPTY = f'{{"format": {FORMAT}, "settings": {{}}, "variants": [], "sessions": [], "cells": {{}}}}'
PARTS = {"settings": dict, "variants": list, "sessions": list, "cells": dict}
ENTRY = {"setting", "variant", "seed", "fingerprint", "base", "evaluation", "seconds"}
IRRELEVANT = {"run.folder", "run.threads"}
"""Of a configuration: what no result depends on."""
Ledger = dict[str, Any]
"""format, settings, variants, planned, sessions, cells: see docs/study.json."""


class Results:
    """The ledger at `path`, written anew with every finished cell. ConfigError if it holds cells of another declaration."""

    def __init__(self, path: Path, settings: Sequence[Setting], cells: Sequence[Cell]) -> None:
        self.path = path
        self.ledger: Ledger = read_ledger(path) if path.exists() else json.loads(EMPTY)
        self.check(settings, cells)
        self.ledger["planned"] = sorted({*self.ledger.get("planned", ()), *(cell.key for cell in cells)})
        self.ledger["settings"] = {**self.ledger["settings"], **{s.name: s.header() for s in settings}}
        windows = {name: header["windows"] for name, header in self.ledger["settings"].items()}
        self.ledger["variants"] = [
            {
                "name": one.name,
                "title": one.title,
                "extra": one.extra,
                "trained_in": {name: one.trained_in(n) for name, n in windows.items()},
                "changes": {name: one.changes(n) for name, n in windows.items()},
            }
            for one in VARIANTS
        ]

    def check(self, settings: Iterable[Setting], cells: Iterable[Cell]) -> None:
        """ConfigError unless what is finished was declared as it is now, values at their defaults included."""
        for setting in settings:
            old = flat(self.ledger["settings"].get(setting.name, {}).get("config", {}))
            new = flat(setting.header()["config"])
            if changed := sorted(key for key in old.keys() & new.keys() - IRRELEVANT if old[key] != new[key]):
                raise ConfigError(
                    f"{self.path} holds the setting {setting.name} with another {', '.join(changed)}: "
                    "finished cells are never mixed; take back the change, or choose another --output"
                )
        for cell in cells:
            found = self.ledger["cells"].get(cell.key)
            if found is not None and found["fingerprint"] != cell.fingerprint:
                raise ConfigError(
                    f"{self.path} holds {cell.key} with other settings than the present ones: "
                    "finished cells are never mixed; take back the change, or choose another --output"
                )

    def finished(self, cell: Cell) -> bool:
        return cell.key in self.ledger["cells"]

    def record(self, cell: Cell, result: dict[str, Any]) -> None:
        """Add a finished cell. One that was run again, since its policy was needed, must have come out the same."""
        entry = self.entry(cell, result)
        found = self.ledger["cells"].get(cell.key, entry)
        base = self.ledger["cells"].get(Cell(cell.setting, BASE, cell.seed).key, entry)
        if outcome(found) != outcome(entry) or base["base"] != entry["base"]:
            raise ConfigError(
                f"{cell.key} came out differently than in {self.path}: this machine computes other numbers than the one "
                "that began the study; choose another --output, so that every comparison is made on one machine"
            )
        self.ledger["cells"][cell.key] = found
        self.save()

    def holds(self, cell: Cell, result: dict[str, Any]) -> bool:
        """Whether the cell is finished, with this very result."""
        return outcome(result).items() <= self.ledger["cells"].get(cell.key, {}).items()

    def entry(self, cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
        return {
            "setting": cell.setting.name,
            "variant": cell.name,
            "seed": cell.seed,
            "fingerprint": cell.fingerprint,
            **result,
        }

    def add_session(self, session: dict[str, Any]) -> None:
        """A sitting that has finished a cell: when it began, how many run side by side, seconds until its latest cell."""
        if all(session is not other for other in self.ledger["sessions"]):
            self.ledger["sessions"].append(session)

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = render(self.ledger)
        write_file(self.path, lambda path: path.write_text(text))


def outcome(entry: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on when a cell was run: all but the time."""
    return {key: value for key, value in entry.items() if key != "seconds"}


def read_ledger(path: Path) -> Ledger:
    try:
        ledger = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(ledger, dict) or ledger.get("format") != FORMAT:
        raise ConfigError(f"{path} is not the record of a study (format {FORMAT}): choose another --output")
    damaged = [part for part, kind in PARTS.items() if not isinstance(ledger.get(part), kind)]
    if not damaged:
        cells = ledger["cells"].items()
        damaged = [key for key, cell in cells if not isinstance(cell, dict) or not cell.keys() >= ENTRY]
    if damaged:
        raise ConfigError(f"{path} is damaged at {', '.join(damaged[:5])}: mend it, or choose another --output")
    return ledger


def render(ledger: Ledger) -> str:
    """JSON with one line per cell, so that a finished cell is one line of a diff."""
    head = {key: value for key, value in ledger.items() if key != "cells"}
    cells = ",\n".join(f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in sorted(ledger["cells"].items()))
    return f'{json.dumps(head, indent=1)[:-2]},\n "cells": {{\n{cells}\n}}}}\n'
