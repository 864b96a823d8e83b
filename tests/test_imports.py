"""Layers never reach up, and whoever only looks pays for nothing heavy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "compactionrl"
HEAVY = {"torch", "transformers", "matplotlib", "pyarrow", "safetensors", "tensorboard", "tokenizers", "renderers"}
HEAVY |= {"starlette", "uvicorn", "peft"}
OURS = ("method", "models", "rollout", "samplers", "environments", "evaluation", "training")


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}}, file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stderr.split())


@pytest.mark.parametrize(
    "code",
    [
        "import compactionrl",
        "import compactionrl.config, compactionrl.config_toml",
        "from compactionrl.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from compactionrl.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass",
        "from compactionrl.cli import main\ntry: main(['config'])\nexcept SystemExit: pass",
    ],
)
def test_looking_loads_nothing_heavy(code: str) -> None:
    assert loaded_after(code) & HEAVY == set()


def test_rollouts_and_evaluation_need_no_torch() -> None:
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for layer in ("rollout", "environments", "evaluation")
        for path in (PACKAGE / layer).glob("*.py")
        if path.stem != "__init__"
    ]
    assert "torch" not in loaded_after(f"import {', '.join(modules)}")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize(
    ("layer", "allowed"),
    [
        ("method", {"method"}),
        ("models", {"method", "models"}),
        ("rollout", {"rollout", "samplers", "environments"}),
        ("environments", {"environments", "samplers", "rollout"}),
        ("evaluation", {"evaluation", "rollout", "samplers", "environments"}),
        ("samplers", {"samplers", "models", "method"}),
    ],
)
def test_no_layer_reaches_up(layer: str, allowed: set[str]) -> None:
    reached = {
        (path.name, name)
        for path in (PACKAGE / layer).rglob("*.py")
        for name in imports(path)
        if name.startswith("compactionrl.") and name.split(".")[1] in set(OURS) - allowed
    }
    assert reached == set()


@pytest.mark.parametrize("layer", ["rollout", "environments", "evaluation"])
def test_no_torch_below_training(layer: str) -> None:
    assert [path.name for path in (PACKAGE / layer).rglob("*.py") if "torch" in imports(path)] == []
