"""The part of a Dockerfile that needs no container engine: what to copy and run on top of a root file system that is there.

FROM is ignored: a sandbox brings its own files. WORKDIR, ENV, COPY and ADD of local files, and RUN are read as Docker reads
them; whatever else a file asks for is refused by name, never skipped.
"""

from __future__ import annotations

import glob
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What ${PATH} stands for until ENV sets it."""
HEREDOC = re.compile(r"(?:^|\s)\d*<<-?[\"']?[A-Za-z_]")
ARCHIVE = re.compile(r"\.(tar|tar\.\w+|tgz|tbz2?|txz)$")
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


class DockerfileError(ValueError):
    """A Dockerfile that asks for more than a sandbox can do; the message names it and its line."""


@dataclass(frozen=True)
class Run:
    """A shell command (for `sh -c`), its directory and variables."""

    command: str
    workdir: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class Copy:
    """Files and folders of the build context; a folder's content goes into `target`, a file becomes it.

    `into`: the target is a folder whatever is there.
    """

    sources: tuple[Path, ...]
    target: str
    into: bool


@dataclass(frozen=True)
class MakeFolder:
    path: str


Step = Run | Copy | MakeFolder


@dataclass
class Dockerfile:
    """Its steps in order, and what holds after the last one."""

    steps: list[Step] = field(default_factory=list)
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)


def read_dockerfile(path: Path) -> Dockerfile:
    """The Dockerfile at `path`; its folder is the build context. Raises DockerfileError."""
    if (path.parent / ".dockerignore").exists():
        raise DockerfileError(
            f"{path.parent}/.dockerignore is not supported: leave out of the folder what it leaves out"
        )
    reader = _Reader(path.parent)
    for number, line in logical_lines(path.read_text()):
        try:
            reader.instruction(line)
        except DockerfileError as error:
            raise DockerfileError(f"{path}, line {number}: {error}") from None
    return reader.file


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Instructions with the number of their first line: comments and empty lines gone, continued lines joined."""
    begun, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*#\s*escape\s*=", line):
            raise DockerfileError(f"line {number}: the escape directive is not supported")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun if parts else number
        continued = re.fullmatch(r"(.*)\\\s*", line)
        parts.append(continued[1] if continued else line)
        if not continued:
            yield begun, "".join(parts).strip()
            parts = []
    if parts:
        yield begun, "".join(parts).strip()


class _Reader:
    def __init__(self, context: Path) -> None:
        self.context = context.resolve()
        self.file = Dockerfile()
        self.stages = 0

    def instruction(self, line: str) -> None:
        name, rest = (*line.split(maxsplit=1), "")[:2]
        name = name.upper()
        read = {
            "FROM": self.from_, "WORKDIR": self.workdir, "ENV": self.env, "COPY": self.copy, "ADD": self.add, "RUN": self.run,
        }.get(name)  # fmt: skip
        if read is None:
            raise DockerfileError(f"{name} is not supported, only FROM, WORKDIR, ENV, COPY, ADD and RUN are")
        if name != "FROM" and (flag := re.match(r"--\w+", rest)):
            raise DockerfileError(f"{name} {flag[0]} is not supported")
        if not rest:
            raise DockerfileError(f"{name} has no argument")
        read(rest)

    def from_(self, rest: str) -> None:
        self.stages += 1
        if self.stages > 1:
            raise DockerfileError("a second FROM (build stages) is not supported")

    def workdir(self, rest: str) -> None:
        self.file.workdir = self.inside(" ".join(self.words(rest)))
        self.file.steps.append(MakeFolder(self.file.workdir))

    def env(self, rest: str) -> None:
        if not re.match(r"\w+=", rest):
            name, _, value = rest.partition(" ")
            if not value:
                raise DockerfileError(f"ENV {name} has no value")
            self.file.env[name] = " ".join(self.words(value))
            return
        values = {}
        for word in self.words(rest):
            name, equals, value = word.partition("=")
            if not equals:
                raise DockerfileError(f"ENV: {word!r} is no NAME=value")
            values[name] = value
        self.file.env |= values

    def copy(self, rest: str) -> None:
        if HEREDOC.search(rest):
            raise DockerfileError("a here-document is not supported")
        *sources, target = _json(rest) or self.words(rest)
        if not sources:
            raise DockerfileError("COPY and ADD need a source and a target")
        found = tuple(path for source in sources for path in self.sources(source))
        into = len(found) > 1 or target.endswith("/") or target in (".", "..")
        self.file.steps.append(Copy(found, self.inside(target), into))

    def add(self, rest: str) -> None:
        *sources, _ = _json(rest) or self.words(rest)
        for source in sources:
            if re.match(r"[a-z+]+://|git@", source):
                raise DockerfileError(f"ADD of {source} is not supported, only that of local files")
            if ARCHIVE.search(source):
                raise DockerfileError(f"ADD of an archive ({source}) is not supported: COPY it and RUN tar")
        self.copy(rest)

    def run(self, rest: str) -> None:
        argv = _json(rest)
        if argv is None and HEREDOC.search(rest):
            raise DockerfileError("a here-document is not supported: put the script into a file and COPY it")
        command = shlex.join(argv) if argv else rest
        self.file.steps.append(Run(command, self.file.workdir, dict(self.file.env)))

    def sources(self, pattern: str) -> list[Path]:
        """What a source names in the context, in order. Nothing outside of it, not through a link either."""
        relative = pattern.lstrip("/") or "."
        found = [
            self.context / path for path in sorted(glob.glob(relative, root_dir=self.context, include_hidden=True))
        ]
        if not found:
            raise DockerfileError(f"{pattern} is not in {self.context}")
        for path in found:
            if not path.resolve().is_relative_to(self.context):
                raise DockerfileError(f"{pattern} is outside of {self.context}")
        return found

    def inside(self, path: str) -> str:
        """An absolute path in the image, `..` resolved."""
        parts: list[str] = []
        for part in PurePosixPath(self.file.workdir, path).parts[1:]:
            parts = parts[:-1] if part == ".." else [*parts, part]
        return "/" + "/".join(parts)

    def words(self, text: str) -> list[str]:
        return words(text, {"PATH": PATH, **self.file.env})


def words(text: str, env: Mapping[str, str]) -> list[str]:
    """Words as Docker splits them: quotes, backslashes, $NAME and ${NAME}; a name that is not set is empty."""
    found, word, quote, at = list[str](), None, "", 0
    while at < len(text):
        char, step, piece = text[at], 1, text[at]
        if char.isspace() and not quote:
            if word is not None:
                found.append(word)
            word, at = None, at + 1
            continue
        if char == quote or (char in "\"'" and not quote):
            quote, piece = ("" if quote else char), ""
        elif char == "\\" and quote != "'" and at + 1 < len(text):
            step = 2
            piece = text[at + 1] if not quote or text[at + 1] in '"$\\' else text[at : at + 2]
        elif char == "$" and quote != "'":
            variable = VARIABLE.match(text, at)
            if variable:
                step, piece = len(variable[0]), env.get(variable[1] or variable[2], "")
            elif text.startswith("${", at):
                raise DockerfileError(f"{text[at : at + 20]} is not supported, only ${{NAME}} is")
        word, at = (word or "") + piece, at + step
    if quote:
        raise DockerfileError(f"a quote ({quote}) is not closed")
    return found if word is None else [*found, word]


def _json(text: str) -> list[str] | None:
    """The JSON form of an instruction's arguments."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) and value and all(isinstance(item, str) for item in value) else None
