"""`compactionrl serve` as an operator runs it."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from serving_harness import PROMPT, in_process

from compactionrl.cli import main
from compactionrl.serving.guard import is_loopback

HTTP = httpx.Client(timeout=60)
SRC = Path(__file__).parents[2] / "src"


@contextmanager
def command(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its address and what it has printed on stderr once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "compactionrl.cli", "serve", "--port", "0", *arguments],
        env={**os.environ, "PYTHONPATH": str(SRC), **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        printed = [process.stderr.readline()]
        address = re.search(r"http://\S+:\d+", printed[0])
        assert address is not None, printed[0] + process.stderr.read()
        yield process, address[0], printed
    finally:
        process.kill()
        process.communicate()


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(number: int) -> None:
    with command("--name", "notes", "--max-length", "100") as (process, url, printed):
        assert printed == [f"notes: contexts of 100 tokens on {url}\n"]
        body = {"prompt": PROMPT, "seed": 3, "model": "notes", "return_token_ids": True}
        reply = HTTP.post(f"{url}/v1/completions", json=body).json()
        assert reply["choices"][0]["token_ids"] == in_process(seed=3).token_ids
        assert HTTP.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 100
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")


def test_a_signal_ends_what_is_being_sampled() -> None:
    with command() as (process, url, _):
        body = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True, "n": 32, "stream": True}
        HTTP.post(f"{url}/pause?mode=keep")
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(f"{url}/v1/completions", json=body, timeout=0.5)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")


def test_the_key_is_asked_for() -> None:
    with command("--key-variable", "OUR_KEY", OUR_KEY="s3cret") as (_, url, printed):
        assert HTTP.get(f"{url}/health").status_code == 200
        for header in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "s3cret"},
            {"Authorization": "Bearer s3cret2"},
        ):
            for refused in (
                HTTP.get(f"{url}/v1/models", headers=header),
                HTTP.post(f"{url}/pause", headers=header),
                HTTP.post(f"{url}/v1/completions", json={"prompt": PROMPT}, headers=header),
            ):
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
                assert "s3cret" not in refused.text
        right = {"Authorization": "Bearer s3cret"}
        assert HTTP.post(f"{url}/v1/completions", json={"prompt": PROMPT}, headers=right).status_code == 200
        assert "s3cret" not in "".join(printed)


def test_who_can_reach_it_is_said() -> None:
    with command("--host", "0.0.0.0") as (process, _, printed):
        assert process.stderr is not None
        assert "--key-variable" in process.stderr.readline()
        assert "0.0.0.0" in printed[0]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("a", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--host 127.0.0.1 --port {port}: " in fails(capsys, "--port", str(port))


def test_mistakes_are_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "NO_SUCH_KEY is not set" in fails(capsys, "--key-variable", "NO_SUCH_KEY", "--port", "0")
    monkeypatch.setenv("OUR_KEY", "clé")  # no client could send it
    assert "cannot be an API key" in fails(capsys, "--key-variable", "OUR_KEY", "--port", "0")
    assert "--allow-weights-from" in fails(capsys, "--allow-weights-from", str(tmp_path / "none"), "--port", "0")
    assert "512 positions" in fails(capsys, "--max-length", "513", "--port", "0")
    assert "no policy can be loaded" in fails(capsys, "--checkpoint", str(tmp_path), "--port", "0")
    assert "model.path" in fails(capsys, "--model.path", str(tmp_path), "--port", "0")
    assert "--host no.such.host.invalid" in fails(capsys, "--host", "no.such.host.invalid")


def test_without_the_extra_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("compactionrl.serving", "uvicorn"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'compactionrl[serve]'" in fails(capsys)
