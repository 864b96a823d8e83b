"""The ledger: what is in it stays as it was, whatever happens to a study."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_fakes import TINY, tiny

from compactionrl.config import ConfigError
from compactionrl.study.grid import Cell, Setting, grid, load_setting
from compactionrl.study.results import EMPTY, Results, read_ledger, render
from compactionrl.study.variants import VARIANTS


def cells_of(*settings: Setting, seeds: int = 2) -> list[Cell]:
    return grid(settings or [tiny()], seeds, extra=True)


def result(outcomes: str = "01-1", base: str = "b" * 64, seconds: float = 1.0) -> dict[str, Any]:
    return {
        "base": base,
        "evaluation": {"x1": {"outcomes": outcomes, "summary_tokens": None}},
        "curves": {"reward": [0.5, None]},
        "seconds": {"wall": seconds, "cpu": seconds},
    }


def opened(path: Path, *settings: Setting) -> Results:
    settings = settings or (tiny(),)
    return Results(path, settings, cells_of(*settings))


BASE, FULL = Cell(tiny(), "base", 1), Cell(tiny(), "full", 1)


def test_a_finished_cell_is_on_disk_at_once_with_all_that_identifies_it(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "study.json"
    results = opened(path)
    assert not results.finished(BASE)
    results.record(BASE, result())
    identity = {"setting": "tiny", "variant": "base", "seed": 1, "fingerprint": BASE.fingerprint}
    assert json.loads(path.read_text())["cells"] == {"tiny/base/1": {**identity, **result()}}
    again = opened(path)
    assert again.finished(BASE)
    assert not again.finished(FULL)
    assert again.ledger == results.ledger


def test_the_ledger_describes_settings_and_arms(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "study.json").ledger
    assert (ledger["format"], ledger["sessions"], ledger["cells"]) == (1, [], {})
    assert ledger["settings"] == {
        "tiny": {
            "modes": ["x1", "x4", "2C", "4C"],
            "compacting": "x4",
            "long": "4C",
            "windows": 4,
            "budget": 128,
            "tasks": 8,
            "rollouts_per_step": 8,
            "steps": 3,
            "toml": TINY.read_text(),
            "config": tiny().config.model_dump(mode="json"),
        }
    }
    assert [entry["name"] for entry in ledger["variants"]] == [one.name for one in VARIANTS]
    robust = ledger["variants"][-1]
    assert robust["trained_in"] == {"tiny": "x1 or x4"}
    assert robust["changes"]["tiny"] == {"train.modes": ["x1", "x4"]}
    assert robust["extra"]
    assert ledger["variants"][0]["trained_in"] == {"tiny": ""}


def test_settings_of_an_earlier_study_keep_their_place(tmp_path: Path) -> None:
    """Going on with one of two settings must not make the other one unreadable."""
    path = tmp_path / "study.json"
    (tmp_path / "wide.toml").write_text(TINY.read_text())
    wide = load_setting(
        str(tmp_path / "wide.toml"), {"context.max_compactions": 7, "evaluation.modes": ["x1", "x8", "2C", "8C"]}
    )
    both = opened(path, tiny(), wide)
    both.record(Cell(wide, "base", 1), result())
    alone = opened(path, tiny())
    assert alone.ledger["settings"] == both.ledger["settings"]
    assert [entry["trained_in"] for entry in alone.ledger["variants"]][-1] == {"tiny": "x1 or x4", "wide": "x1 or x8"}
    assert alone.ledger["variants"] == both.ledger["variants"]
    assert set(alone.ledger["cells"]) == {"wide/base/1"}


def test_cells_of_other_settings_are_refused_and_stay(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    opened(path).record(FULL, result())
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"study\.json holds the setting tiny with another train\.alpha.*--output"):
        opened(path, tiny(train__alpha=2.0))
    assert path.read_bytes() == before
    assert opened(path).finished(FULL)


def test_a_cell_that_comes_out_the_same_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    opened(path).record(FULL, result(seconds=1.0))
    before = json.loads(path.read_text())
    again = opened(path)
    again.record(FULL, result(seconds=2.0))
    assert json.loads(path.read_text()) == before == again.ledger
    assert again.holds(FULL, result(seconds=3.0))
    assert not again.holds(FULL, result("0000"))
    assert not again.holds(BASE, result())


@pytest.mark.parametrize(
    "other",
    [
        result("0101"),
        result(base="c" * 64),
        {**result(), "curves": {"reward": [0.5, 0.25]}},
        {**result(), "tokens": {}},
    ],
)
def test_a_cell_that_comes_out_differently_is_refused_and_the_first_one_stays(tmp_path: Path, other: Any) -> None:
    path = tmp_path / "study.json"
    results = opened(path)
    results.record(FULL, result())
    before, ledger = path.read_bytes(), deepcopy(results.ledger)
    with pytest.raises(ConfigError, match=r"tiny/full/1 came out differently.*--output"):
        results.record(FULL, other)
    assert path.read_bytes() == before
    assert results.ledger == ledger


def test_a_cell_that_started_from_another_base_is_refused(tmp_path: Path) -> None:
    """A seed's arms are compared pairwise: they must have begun alike."""
    path = tmp_path / "study.json"
    results = opened(path)
    results.record(BASE, result())
    with pytest.raises(ConfigError, match=r"tiny/full/1 came out differently"):
        results.record(FULL, result(base="c" * 64))
    assert not results.finished(FULL)
    results.record(Cell(tiny(), "full", 2), result(base="c" * 64))
    assert set(json.loads(path.read_text())["cells"]) == {"tiny/base/1", "tiny/full/2"}


def test_a_disk_that_is_full_leaves_the_ledger_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.json"
    results = opened(path)
    results.record(BASE, result())
    before = path.read_bytes()

    def full(self: Path, text: str) -> None:
        os.close(os.open(self, os.O_CREAT | os.O_TRUNC | os.O_WRONLY))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            results.record(FULL, result())
    assert path.read_bytes() == before
    results.save()
    assert set(json.loads(path.read_text())["cells"]) == {"tiny/base/1", "tiny/full/1"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"format": 1, "cells": {', "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "is not the record of a study"),
        (b'{"cells": {}}', "is not the record of a study"),
        (b'{"format": 2, "cells": {}}', "is not the record of a study"),
        (b'{"format": 1}', "is damaged at settings, variants, sessions, cells"),
        (EMPTY.replace('"cells": {}', '"cells": []').encode(), "is damaged at cells"),
        (EMPTY.replace('"cells": {}', '"cells": {"tiny/full/1": {}}').encode(), "is damaged at tiny/full/1"),
        (EMPTY.replace('"cells": {}', '"cells": {"tiny/full/1": null}').encode(), "is damaged at tiny/full/1"),
    ],
)
def test_another_file_is_refused_and_not_overwritten(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "study.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        opened(path)
    assert path.read_bytes() == content


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


@given(cells=st.dictionaries(st.text(), st.dictionaries(st.text(), values, max_size=3), max_size=4), head=values)
def test_what_is_written_is_read_again_with_a_line_per_cell(cells: dict[str, Any], head: Any) -> None:
    ledger = {"format": 1, "settings": head, "sessions": [], "cells": cells}
    text = render(ledger)
    assert json.loads(text) == ledger
    assert text.endswith("\n")
    lines = text.split("\n")
    for key, cell in cells.items():
        assert sum(line.rstrip(",") == f"{json.dumps(key)}: {json.dumps(cell)}" for line in lines) == 1


def test_a_new_cell_is_one_new_line(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    results = opened(path)
    lines = []
    for name in ("full", "base", "no-summary"):
        results.record(Cell(tiny(), name, 1), result())
        lines.append([line.rstrip(",") for line in path.read_text().splitlines()])
    for before, after in pairwise(lines):
        assert len(after) == len(before) + 1
        assert set(before) < set(after)
    assert read_ledger(path) == results.ledger


def test_a_changed_default_is_noticed_and_a_new_key_is_not(tmp_path: Path) -> None:
    """What a finished cell does not state in its fingerprint, the setting's whole configuration does."""
    path = tmp_path / "study.json"
    results = opened(path)
    results.record(FULL, result())
    config = results.ledger["settings"]["tiny"]["config"]
    del config["train"]["value_clip"]  # the key did not exist then
    results.save()
    opened(path)
    config["train"]["clip_high"] = 0.3
    results.save()
    with pytest.raises(ConfigError, match=r"tiny with another train\.clip_high"):
        opened(path)
