"""Sandboxes by name."""

import sys
from types import ModuleType

import pytest

from compactionrl.sandboxes import open_sandbox


class Own:
    def __init__(self, colour: str) -> None:
        self.colour = colour


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("own_sandbox")
    made.Own = Own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_sandbox", made)


@pytest.mark.usefixtures("module")
def test_own_class_takes_options() -> None:
    assert open_sandbox("own_sandbox:Own", colour="red").colour == "red"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("name", ["docker", "own_sandbox:Other", "no_such_module:Class"])
def test_name_that_leads_nowhere(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        open_sandbox(name)


@pytest.mark.usefixtures("module")
def test_option_that_a_class_does_not_take() -> None:
    with pytest.raises(TypeError, match="size"):
        open_sandbox("own_sandbox:Own", size=1)
