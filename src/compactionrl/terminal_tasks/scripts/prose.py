"""What the oracles need to read running text: its lines are as long as a page is wide, and sentences go on over their ends."""

from __future__ import annotations

import re
from pathlib import Path


def prose(*folders: Path) -> str:
    """The texts of all `*.txt` in the folders, in the order of their names, without line breaks."""
    files = (file for folder in folders for file in sorted(folder.glob("*.txt")))
    return " ".join(" ".join(file.read_text(encoding="utf-8").split()) for file in files)


def sentences(file: Path) -> list[str]:
    """Without the full stops."""
    return re.split(r"\.(?:\s+|$)", " ".join(file.read_text(encoding="utf-8").split()))
