"""Folders and files that are written completely or not at all, whenever the process or the machine dies."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

MANIFEST = "manifest.json"
PARTIAL = ".partial-"
"""Prefix of what is still being written."""


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a folder beside `folder`, add a manifest, bring all to disk, then rename it to `folder`."""
    partial = folder.with_name(PARTIAL + folder.name)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    fill(partial)
    entries = {str(path.relative_to(partial)): describe(path) for path in files(partial)}
    (partial / MANIFEST).write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    partial.rename(folder)
    sync(folder.parent)


def write_file(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a file beside `path`, bring it to disk, then put it in the place of `path`."""
    partial = path.with_name(PARTIAL + path.name)
    fill(partial)
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def is_complete(folder: Path) -> bool:
    """Whether the folder holds all files of its manifest, byte for byte. What others put beside them is not our concern."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return all((folder / name).is_file() and describe(folder / name) == entry for name, entry in entries.items())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def describe(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
