"""The extension of vLLM's worker, with a stand-in for vLLM; `make vllm` runs it inside the real one."""

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "compactionrl" / "integrations" / "vllm_worker.py"


def extension(monkeypatch: pytest.MonkeyPatch, *, cpu: bool) -> tuple[Any, Any]:
    """The module as a worker imports it, and vLLM's operators."""
    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    vllm._custom_ops = SimpleNamespace(_supports_onednn=True)  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: cpu)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.delitem(sys.modules, "compactionrl.integrations.vllm_worker", raising=False)
    return importlib.import_module("compactionrl.integrations.vllm_worker"), vllm._custom_ops  # type: ignore[attr-defined]


@pytest.mark.parametrize("cpu", [True, False])
def test_packed_copies_are_switched_off_on_cpu_only(cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, operators = extension(monkeypatch, cpu=cpu)
    assert operators._supports_onednn is not cpu


def test_weights_have_a_version_only_once_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = extension(monkeypatch, cpu=True)
    loaded: list[str] = []

    class Worker:
        def reload_weights(self, *, weights_path: str) -> None:
            if "missing" in weights_path:
                raise FileNotFoundError(weights_path)
            assert self.pushed_weights_version() == ""  # type: ignore[attr-defined]
            loaded.append(weights_path)

    worker = type("Extended", (Worker, module.PushedWeights), {})()
    assert worker.pushed_weights_version() == ""
    assert worker.load_pushed_weights("/w/1", "run-1") == "run-1"
    assert worker.pushed_weights_version() == "run-1"
    with pytest.raises(FileNotFoundError):
        worker.load_pushed_weights("/w/missing", "run-2")
    assert worker.pushed_weights_version() == ""
    assert loaded == ["/w/1"]


def test_it_brings_nothing_of_ours_into_the_server() -> None:
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert names == {"__future__", "typing", "vllm", "vllm.platforms"}
