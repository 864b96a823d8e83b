"""Files as a stream: what goes in comes out, and nothing leads elsewhere."""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compactionrl.sandboxes import transfer
from compactionrl.sandboxes.transfer import TransferError, pack_file, pack_folder, unpack

MOST = 1 << 20
names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200
)


def packed(folder: Path, *, links: bool = False, most: int = MOST) -> io.BytesIO:
    stream = io.BytesIO()
    pack_folder(folder, stream, most, links=links)
    stream.seek(0)
    return stream


def entry(path: list[str], content: bytes | None = None, **fields: object) -> bytes:
    size = {} if content is None else {"size": len(content)}
    return json.dumps({"path": path, "mode": 0o644, **size, **fields}).encode() + b"\n" + (content or b"")


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.lists(names, min_size=1, max_size=3).map(tuple), st.binary(max_size=2000), max_size=6))
def test_round_trip(files: dict[tuple[str, ...], bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name, "source"), Path(name, "target")
        source.mkdir()
        wanted = {}
        for path, content in files.items():
            file = source.joinpath(*path)
            if any(parent.is_file() for parent in (file, *file.parents)) or file.is_dir():
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            wanted[path] = content
        unpack(packed(source), target, MOST, links=False)
        assert {path: target.joinpath(*path).read_bytes() for path in wanted} == wanted
        assert sum(each.is_file() for each in target.rglob("*")) == len(wanted)


def test_modes_come_along_but_no_setuid(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/run").write_text("x")
    (tmp_path / "a/run").chmod(0o4755)
    unpack(packed(tmp_path / "a"), tmp_path / "b", MOST, links=False)
    assert (tmp_path / "b/run").stat().st_mode & 0o7777 == 0o755


def test_links_fifos_and_hard_links(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.mkdir()
    (source / "file").write_text("x")
    os.link(source / "file", source / "hard")
    (source / "link").symlink_to("/etc/passwd")
    os.mkfifo(source / "fifo")
    unpack(packed(source), tmp_path / "b", MOST, links=False)
    assert sorted(os.listdir(tmp_path / "b")) == ["file", "hard"]
    unpack(packed(source, links=True), tmp_path / "c", MOST, links=True)
    assert sorted(os.listdir(tmp_path / "c")) == ["file", "hard", "link"]
    assert os.readlink(tmp_path / "c/link") == "/etc/passwd"


@pytest.mark.parametrize(
    "stream",
    [
        entry([".."], b"x"),
        entry(["..", "out"], b"x"),
        entry(["a", "..", "..", "out"], b"x"),
        entry(["/out"], b"x"),
        entry(["a/../../out"], b"x"),
        entry([""], b"x"),
        entry([], b"x"),
        entry(["out\0"], b"x"),
        entry(["a"] * 200, b"x"),
        entry(["link"], None, link="/"),
        entry(["cut"], None, size=100) + b"only this",
        b"no json at all",
        entry(["large"], None, size=MOST + 1),
        entry(["file"], b"x"),  # without its end
    ],
)
def test_hostile_streams_are_refused(tmp_path: Path, stream: bytes) -> None:
    target = tmp_path / "in" / "target"
    with pytest.raises(TransferError):
        unpack(io.BytesIO(stream), target, MOST, links=False)
    assert os.listdir(tmp_path) == ["in"]
    assert os.listdir(tmp_path / "in") == ["target"]


def test_a_link_in_the_stream_is_not_written_through(tmp_path: Path) -> None:
    """The one that matters most: first a link, then a file behind it."""
    (tmp_path / "outside").mkdir()
    stream = entry(["d"], None, link=str(tmp_path / "outside")) + entry(["d", "file"], b"x") + b"\n"
    with pytest.raises(OSError, match="d"):
        unpack(io.BytesIO(stream), tmp_path / "target", MOST, links=True)
    assert os.listdir(tmp_path / "outside") == []


def test_links_that_stand_there_are_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("as it was")
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").symlink_to(tmp_path / "victim")
    (target / "folder").symlink_to(tmp_path / "elsewhere")
    stream = entry(["file"], b"new") + entry(["folder"]) + entry(["folder", "x"], b"y") + b"\n"
    unpack(io.BytesIO(stream), target, MOST, links=False)
    assert (tmp_path / "victim").read_text() == "as it was"
    assert os.listdir(tmp_path / "elsewhere") == []
    assert (target / "file").read_text() == "new"
    assert (target / "folder/x").read_text() == "y"


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(TransferError, match="x"):
        unpack(io.BytesIO(entry(["x"], b"") + b"\n"), tmp_path, MOST, links=False)


def test_one_file_is_the_file_that_was_asked_for(tmp_path: Path) -> None:
    stream = entry(["other"], b"x") + b"\n"
    with pytest.raises(TransferError, match="other"):
        unpack(io.BytesIO(stream), tmp_path, MOST, links=False, only="wanted")


def test_bytes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    with pytest.raises(TransferError, match="sparse"):
        packed(tmp_path)
    with pytest.raises(TransferError, match="sparse"):
        pack_file(tmp_path / "sparse", "sparse", io.BytesIO(), MOST)


def test_only_regular_files_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(TransferError, match="regular"):
            pack_file(path, "x", io.BytesIO(), MOST)


def test_a_link_that_appears_at_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the clearing of a name and the making of its file."""
    (tmp_path / "victim").write_text("as it was")

    def plant(parent: int, name: str) -> None:
        os.symlink(tmp_path / "victim", name, dir_fd=parent)

    monkeypatch.setattr(transfer, "clear", plant)
    with pytest.raises(FileExistsError):
        unpack(io.BytesIO(entry(["file"], b"new") + b"\n"), tmp_path / "target", MOST, links=False)
    assert (tmp_path / "victim").read_text() == "as it was"
