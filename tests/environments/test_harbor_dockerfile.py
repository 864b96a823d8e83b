"""A Dockerfile is read as Docker reads it, or refused by the name of what is not supported."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compactionrl.environments.dockerfile import (
    PATH,
    Copy,
    DockerfileError,
    MakeFolder,
    Run,
    logical_lines,
    read_dockerfile,
    words,
)

UNSUPPORTED = [
    "ARG",
    "LABEL",
    "CMD",
    "ENTRYPOINT",
    "EXPOSE",
    "VOLUME",
    "USER",
    "SHELL",
    "HEALTHCHECK",
    "ONBUILD",
    "MAINTAINER",
]


@pytest.fixture
def read(tmp_path):
    """Writes a Dockerfile beside a few files and reads it."""
    for name in ("a.txt", "b.txt", ".hidden.txt", "data/deep/c.txt", "two words.txt", "x.tar.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def write(text):
        (tmp_path / "Dockerfile").write_text(text)
        return read_dockerfile(tmp_path / "Dockerfile")

    return write


def test_a_whole_file(read, tmp_path):
    file = read(
        "# syntax=docker/dockerfile:1\n"
        "FROM python:3.12-slim\n\n"
        'ENV A=1 B="two words" \\\n'
        "    # a comment between\n"
        "    C='$A'\n"
        "WORKDIR /srv\n"
        "WORKDIR app/${A}\n"
        "copy a.txt b.txt ./\n"
        'ADD ["two words.txt", "/x/two"]\n'
        "ENV PATH=/opt/$A:$PATH\n"
        "RUN echo $A && \\\n"
        "    echo 'a  b'\n"
        'RUN ["echo", "it is"]\n'
        "COPY data /data\n"
    )
    env = {"A": "1", "B": "two words", "C": "$A"}
    later = {**env, "PATH": f"/opt/1:{PATH}"}
    at = tmp_path.resolve()
    assert file.steps == [
        MakeFolder("/srv"),
        MakeFolder("/srv/app/1"),
        Copy((at / "a.txt", at / "b.txt"), "/srv/app/1", True),
        Copy((at / "two words.txt",), "/x/two", False),
        Run("echo $A &&     echo 'a  b'", "/srv/app/1", later),
        Run("echo 'it is'", "/srv/app/1", later),
        Copy((at / "data",), "/data", False),
    ]
    assert (file.workdir, file.env) == ("/srv/app/1", later)


def test_a_variable_holds_from_the_next_line_on(read):
    file = read("ENV A=1\nENV A=2 B=$A\nRUN x\nENV A=3\nENV OLD form of it\nENV EMPTY= NONE=$NOTHING\n")
    assert file.steps == [Run("x", "/", {"A": "2", "B": "1"})]
    assert file.env == {"A": "3", "B": "1", "OLD": "form of it", "EMPTY": "", "NONE": ""}


def test_sources_may_be_patterns(read, tmp_path):
    at = tmp_path.resolve()
    assert read("COPY *.txt /app/").steps[0].sources == tuple(
        at / name for name in (".hidden.txt", "a.txt", "b.txt", "two words.txt")
    )
    assert read("COPY /a.txt /app/x").steps == [Copy((at / "a.txt",), "/app/x", False)]
    assert read("COPY . .").steps == [Copy((at,), "/", True)]
    assert read("WORKDIR /a/b\nCOPY a.txt ../c/../d").steps[-1] == Copy((at / "a.txt",), "/a/d", False)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        *((f"{name} x", name) for name in UNSUPPORTED),
        ("STOPSIGNAL 9", "STOPSIGNAL"), ("nonsense", "NONSENSE"), ("FROM again", "second FROM"),
        ("COPY --from=build /x /y", "COPY --from"), ("COPY --chown=a a.txt /y", "COPY --chown"),
        ("RUN --mount=type=cache x", "RUN --mount"), ("RUN <<EOF", "here-document"), ("RUN cat <<'X' > y", "here-document"),
        ("COPY <<EOF /x", "here-document"), ("ADD http://a/b /x", "http://a/b"), ("ADD git@github.com:a/b /x", "git@"),
        ("ADD x.tar.gz /x", "archive"), ("COPY missing /x", "missing"), ("COPY .. /x", "outside"),
        ("COPY link /x", "outside"), ("COPY a.txt", "source and a target"), ("WORKDIR ${A:-x}", "${A:-x}"),
        ("ENV A", "ENV A has no value"), ("ENV A=1 B", "'B'"), ("ENV A='x", "quote"), ("WORKDIR", "WORKDIR"), ("RUN", "RUN"),
    ],
)  # fmt: skip
def test_everything_else_is_refused_by_name_and_line(read, tmp_path, line, named):
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(DockerfileError) as refused:
        read(f"FROM x\n\n{line}\n")
    assert named in str(refused.value)
    assert "line 3" in str(refused.value)


def test_shifts_are_no_here_documents(read):
    assert read("RUN echo $((1<<4)) && cat <<<word").steps[0].command == "echo $((1<<4)) && cat <<<word"


def test_what_changes_how_a_file_is_read_is_refused(read, tmp_path):
    with pytest.raises(DockerfileError, match="escape"):
        read("# escape=`\nFROM x")
    (tmp_path / ".dockerignore").write_text("*")
    with pytest.raises(DockerfileError, match="dockerignore"):
        read("FROM x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a  b\tc", ["a", "b", "c"]),
        ("\"a b\"'c d'e", ["a bc de"]),
        ("'' x", ["", "x"]),
        (r"a\ b \$A \\", ["a b", "$A", "\\"]),
        (r'"\$A \" \\ \n"', [r"$A " + '" \\ \\n']),
        ("$A-${A}$ $AB 100$", ["1-1$", "", "100$"]),
        ("'$A \\' $A", ["$A \\", "1"]),
    ],
)
def test_words(text, expected):
    assert words(text, {"A": "1"}) == expected


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters='"$\\\r\n')), max_size=5))
def test_quoted_words_come_back(parts):
    assert words(" ".join(f'"{part}"' for part in parts), {}) == parts


def test_lines_are_joined_and_numbered_by_their_first():
    assert list(logical_lines("\n# c\na \\\n  # c\n\n b\\ \nc\n d\nlast \\")) == [(3, "a  bc"), (8, "d"), (9, "last")]
