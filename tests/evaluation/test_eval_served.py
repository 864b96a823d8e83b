"""`compactionrl eval` end to end: against a server of ours over HTTP, killed, stopped, refused."""

import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO
from eval_server import SRC, ledgers, results, serving, start

from compactionrl.build import DEMO as BASE
from compactionrl.cli import EXTRAS, main
from compactionrl.evaluation.rollout_file import read_rollouts
from compactionrl.models import load_policy

SMALL = ["--limit", "6", "--runs", "2", "--modes", "x1,x4", "--concurrency", "4"]


@pytest.fixture(params=["FakeVLLM", "FakeSGLang"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server written from an engine's documentation, with the packaged base in it."""
    import fake_servers

    policy = load_policy(BASE)
    monkeypatch.setattr(fake_servers, "TINY", policy.config)
    server = getattr(fake_servers, request.param)(policy)
    with fake_servers.running(server):
        yield server


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: str, config: Path = DEMO) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(config), *arguments])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the packaged base in this process, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole") / "results"
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(DEMO), *SMALL, "--output", str(folder)])
    assert not ended.value.code
    return folder


def same(found: Path, expected: Path) -> None:
    """Token for token; log-probabilities as far as float32 goes."""
    mine, theirs = ledgers(found), ledgers(expected)
    assert mine.keys() == theirs.keys()
    for name, windows in mine.items():
        for (ids, segments, logprobs), (other_ids, other_segments, other_logprobs) in zip(
            windows, theirs[name], strict=True
        ):
            assert (ids, segments) == (other_ids, other_segments)
            assert logprobs == pytest.approx(other_logprobs, abs=1e-4)
    assert results(found)["arms"] == results(expected)["arms"]
    assert results(found)["differences"] == results(expected)["differences"]


def test_a_served_model_is_measured_as_one_in_process(
    capsys: pytest.CaptureFixture[str], in_process: Path, tmp_path: Path
) -> None:
    with serving(BASE, **{"sampling.concurrency": 4}) as url:
        code, out, _ = evaluate(capsys, *SMALL, "--url", f"{url}/v1", "--output", str(tmp_path / "r"))
    assert code == 0
    assert url in out
    same(tmp_path / "r", in_process)
    about = results(tmp_path / "r")["about"]
    assert (about["agent"], about["exact"]) == ("tiny", True)
    assert "vllm" in about["sampler"]

    # The server is gone. What is complete is shown, whoever asks; what is not there would be asked for.
    assert evaluate(capsys, *SMALL, "--url", url, "--output", str(tmp_path / "r"))[0] == 0
    code, _, err = evaluate(capsys, *SMALL, "--runs", "3", "--url", url, "--output", str(tmp_path / "r"))
    assert code == 2
    assert url in err


def test_a_served_summariser_takes_tokens_if_its_tokenizer_is_the_policys(
    capsys: pytest.CaptureFixture[str], in_process: Path, base: Path, tmp_path: Path
) -> None:
    """The paper's Table 1 in one command."""
    with serving(BASE, name="same") as url:
        code, _, _ = evaluate(
            capsys, *SMALL, "--modes", "x4", "--summariser", f"own,{url}", "--output", str(tmp_path / "r")
        )
    assert code == 0
    found = results(tmp_path / "r")
    name = f"x4+{url.partition('://')[2]}"
    assert list(found["arms"]) == ["x4", name]
    assert (
        found["arms"]["x4"]["outcomes"]
        == found["arms"][name]["outcomes"]
        == results(in_process)["arms"]["x4"]["outcomes"]
    )
    assert [(d["arm"], d["minus"], d["difference"]) for d in found["differences"]] == [(name, "x4", 0.0)]
    assert "token ids" in found["about"]["summarisers"][url.partition("://")[2]]
    swapped = [r for r in read_rollouts(tmp_path / "r" / "rollouts.jsonl.gz") if r.id.startswith(name)]
    excluded = {s.excluded for r in swapped for s in r.segments if s.kind == "summary"}
    assert excluded == {"written by another summariser"}


def test_a_summariser_by_the_name_of_its_model_is_measured_on_top(
    capsys: pytest.CaptureFixture[str], base: Path, tmp_path: Path
) -> None:
    short = ["--limit", "2", "--modes", "x4", "--limits.turns", "12", "--output", str(tmp_path / "r")]
    assert evaluate(capsys, *short)[0] == 0
    before = ledgers(tmp_path / "r")
    with serving(BASE, name="second") as url:
        code, _, err = evaluate(capsys, *short, "--summariser", f"own,{url}", "--summariser-model", "second")
    assert code == 0, err
    assert list(results(tmp_path / "r")["arms"]) == ["x4", "x4+second"]
    after = ledgers(tmp_path / "r")
    assert len(after) == 2 * len(before)
    assert {name: after[name] for name in before} == before
    assert evaluate(capsys, *short)[0] == 0  # and is passed over where nobody asks for it


def wait_for(path: Path, size: int, process: subprocess.Popen[str]) -> None:
    while not path.exists() or path.stat().st_size < size:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_killed_again_and_again_it_comes_to_the_same_result(
    capsys: pytest.CaptureFixture[str], in_process: Path, tmp_path: Path
) -> None:
    folder, file = tmp_path / "r", tmp_path / "r" / "rollouts.jsonl.gz"
    arguments = [*SMALL, "--output", str(folder)]
    whole = (in_process / "rollouts.jsonl.gz").read_bytes()
    for part in (0.2, 0.6):
        process = start(*arguments)
        wait_for(file, int(part * len(whole)), process)
        process.kill()
        process.communicate()
        with file.open("ab") as torn:  # as if it had been killed while writing
            torn.write(whole[:100])
    assert not (folder / "results.json").exists()
    assert evaluate(capsys, *arguments)[0] == 0
    names = [rollout.id for rollout in read_rollouts(file)]
    assert len(names) == len(set(names)) == 24  # none lost, none repeated
    same(folder, in_process)


def test_stopped_it_shows_what_there_is_and_goes_on(
    capsys: pytest.CaptureFixture[str], in_process: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    arguments = [*SMALL, "--output", str(folder)]
    whole = (in_process / "rollouts.jsonl.gz").stat().st_size
    missing = 24
    for number, part in ((signal.SIGINT, 0.2), (signal.SIGTERM, 0.6)):
        process = start(*arguments)
        wait_for(folder / "rollouts.jsonl.gz", int(part * whole), process)
        process.send_signal(number)
        _, err = process.communicate()
        assert process.returncode == 130
        assert f"stopped; what has ended is kept in {folder}, and the same command goes on" in err
        assert "Traceback" not in err
        stopped = results(folder)
        assert 0 < stopped["missing"] < missing
        missing = stopped["missing"]
        assert missing + sum(arm["n"] for arm in stopped["arms"].values()) == 24
        assert "Not complete" in (folder / "report.md").read_text()
    assert evaluate(capsys, *arguments)[0] == 0
    same(folder, in_process)


def test_another_address_may_be_another_model(
    capsys: pytest.CaptureFixture[str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what is shown must not be what another server was measured with, even if nothing is left to ask."""
    monkeypatch.chdir(tmp_path)
    short = ["--limit", "1", "--modes", "x1", "--limits.turns", "2"]
    with serving(base) as first, serving(base, name="other") as second:
        assert evaluate(capsys, *short, "--url", first, "--output", "r")[0] == 0
        code, _, err = evaluate(capsys, *short, "--url", second, "--output", "r")
        assert code == 2
        assert f"server.urls: {first} in the folder, {second} now" in err
        assert "--model tiny" in err
        code, _, err = evaluate(capsys, *short, "--url", second, "--model", "other", "--output", "r")
        assert code == 2
        assert "server.model: 'tiny' there, 'other' now" in err
        assert evaluate(capsys, *short, "--url", second, "--model", "tiny", "--output", "r")[0] == 0  # complete
        for url in (first, second):
            assert evaluate(capsys, *short, "--url", url)[0] == 0
    assert len(list(Path("runs/eval").iterdir())) == 2


def test_a_summariser_must_stay_the_same(capsys: pytest.CaptureFixture[str], base: Path, tmp_path: Path) -> None:
    short = ["--modes", "x4", "--limits.turns", "2", "--output", str(tmp_path), "--checkpoint", str(base)]
    with serving(base, name="first") as url:
        assert evaluate(capsys, "--limit", "1", *short, "--summariser", url)[0] == 0
    with serving(base, name="second", port=int(url.rpartition(":")[2])) as again:
        assert again == url
        code, _, err = evaluate(capsys, "--limit", "2", *short, "--summariser", url)
    assert code == 2
    assert "was first, vllm, token ids, and is now second" in err


def test_more_is_measured_on_top_of_what_there_is(
    capsys: pytest.CaptureFixture[str], in_process: Path, tmp_path: Path
) -> None:
    folder = str(tmp_path / "r")
    assert evaluate(capsys, "--limit", "2", "--modes", "x4", "--output", folder)[0] == 0
    before = (tmp_path / "r" / "rollouts.jsonl.gz").read_bytes()
    assert evaluate(capsys, *SMALL, "--output", folder)[0] == 0
    assert (tmp_path / "r" / "rollouts.jsonl.gz").read_bytes().startswith(before)
    same(tmp_path / "r", in_process)
    assert evaluate(capsys, "--limit", "2", "--modes", "x4", "--output", folder)[0] == 0
    assert list(results(tmp_path / "r")["arms"]) == ["x4"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("context.tail_steps", "2"), ("limits.turns", "9"), ("sampling.temperature", "0.5"), ("evaluation.seed", "1")],
)
def test_another_configuration_in_the_same_folder_is_refused(
    capsys: pytest.CaptureFixture[str], in_process: Path, key: str, value: str
) -> None:
    before = {path.name: path.read_bytes() for path in in_process.iterdir()}
    code, _, err = evaluate(capsys, *SMALL, f"--{key}", value, "--output", str(in_process))
    assert code == 2
    assert f"{key}: " in err
    assert "--output" in err
    assert {path.name: path.read_bytes() for path in in_process.iterdir()} == before


def test_a_folder_that_holds_something_else_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    code, _, err = evaluate(capsys, "--output", str(tmp_path))
    assert code == 2
    assert "holds something else" in err
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_the_same_command_finds_its_folder_again(
    capsys: pytest.CaptureFixture[str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for limit in ("1", "2"):
        assert evaluate(capsys, "--limit", limit, "--modes", "x1", "--checkpoint", str(base))[0] == 0
    (folder,) = Path("runs/eval").iterdir()
    assert folder.name.startswith("base-")
    assert len(ledgers(folder)) == 2
    assert evaluate(capsys, "--limit", "1", "--modes", "x1", "--checkpoint", str(base), "--limits.turns", "3")[0] == 0
    assert len(list(Path("runs/eval").iterdir())) == 2


RIGHT = ["--server.key_variable", "RIGHT_KEY"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--context.threshold", "30"], "context.threshold (30) must be at least"),
        (
            ["--tasks", "logbook", "--environment.options.calls", "native", "--context.threshold", "60"],
            "context.threshold (60) must be at least",
        ),
        (["--context.budget", "100000"], "context.budget: this model has"),
        (["--summariser", "nowhere"], "nowhere"),
    ],
)
def test_a_context_that_cannot_work_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], told: str
) -> None:
    folder = tmp_path / "runs" / "r"
    code, _, err = evaluate(capsys, "--modes", "x1,x4", "--limit", "2", *arguments, "--output", str(folder))
    assert code == 2
    assert told in err
    assert not folder.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*RIGHT, "--model", "other"], ["serves tiny, not other", "server.model"]),
        (["--server.key_variable", "WRONG_KEY"], ["401", "server.key_variable"]),
        ([], ["401", "server.key_variable"]),
        (["--server.key_variable", "NO_KEY"], ["NO_KEY", "not set"]),
        ([*RIGHT, "--modes", "99C"], ["serves contexts of", "but 12672 are needed", "context.budget"]),
    ],
)
def test_what_a_server_refuses_ends_at_once(
    capsys: pytest.CaptureFixture[str],
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: list[str],
) -> None:
    for name, key in (("RIGHT_KEY", "right-secret"), ("WRONG_KEY", "wrong-secret")):
        monkeypatch.setenv(name, key)
    with serving(base, key="right-secret") as url:
        code, _, err = evaluate(capsys, "--limit", "1", "--url", url, *arguments, "--output", str(tmp_path / "r"))
    assert code == 2
    assert "secret" not in err
    assert [word for word in words if word not in err] == []
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("secret", ["right-secret", "password"])
def test_a_secret_opens_and_is_written_nowhere(
    capsys: pytest.CaptureFixture[str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("RIGHT_KEY", "right-secret")
    with serving(base, key="right-secret" if secret == "right-secret" else "") as url:
        url = url.replace("//", "//someone:password@") if secret == "password" else url
        output = ["--output", str(tmp_path / "r"), "--limit", "1", "--modes", "x1", "--limits.turns", "2"]
        code, out, err = evaluate(capsys, "--url", url, *(RIGHT if secret == "right-secret" else []), *output)
    assert code == 0, err
    assert secret not in out + err
    for path in (tmp_path / "r").iterdir():
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert secret.encode() not in content


def test_another_models_tokenizer_is_noticed(capsys: pytest.CaptureFixture[str], smollm2: Path, tmp_path: Path) -> None:
    """Its ids would be read as other words, and every answer would be wrong."""
    with serving(BASE) as url:
        code, _, err = evaluate(capsys, "--url", url, "--tokenizer", str(smollm2), "--output", str(tmp_path / "r"))
    assert code == 2
    assert "another tokenizer" in err


@pytest.mark.parametrize("fake", ["FakeVLLM"], indirect=True)
def test_a_server_without_a_tokenizer_here(capsys: pytest.CaptureFixture[str], tmp_path: Path, fake: Any) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--url", fake.url, "--output", str(tmp_path / "r"), "--tasks", "notes"])
    assert "--tokenizer" in capsys.readouterr().err


def test_the_protocol_is_found_out(capsys: pytest.CaptureFixture[str], tmp_path: Path, fake: Any) -> None:
    short = ["--limit", "1", "--modes", "x1", "--limits.turns", "2", "--output", str(tmp_path / "r")]
    code, _, err = evaluate(capsys, "--url", fake.url, *short)
    assert code == 0, err
    assert fake.route in {path for path, _ in fake.requests}
    about = results(tmp_path / "r")["about"]
    assert type(fake).__name__.removeprefix("Fake").lower() in about["sampler"]
    assert "does not say whether its tokenizer is ours" in about["sampler"]


def test_a_server_that_dies_leaves_what_was_measured(
    capsys: pytest.CaptureFixture[str], in_process: Path, tmp_path: Path
) -> None:
    """Then it comes back at another address, and the same command goes on there."""
    folder, options = tmp_path / "r", {"sampling.concurrency": 4}
    arguments = [*SMALL, "--output", str(folder), "--model", "tiny", "--server.retries", "0", "--train.retries", "0"]
    with serving(BASE, **options) as url:
        process = start(*arguments, "--url", url)
        wait_for(folder / "rollouts.jsonl.gz", (in_process / "rollouts.jsonl.gz").stat().st_size // 4, process)
    out, err = process.communicate()
    assert process.returncode in (1, 2)  # 2 if 16 in a row broke down before the end
    assert "Traceback" not in err
    assert "no answer" in out + err or "shutting" in out + err  # whichever comes first
    kept = results(folder)
    assert 0 < kept["missing"] < 24
    with serving(BASE, **options) as url:
        assert evaluate(capsys, *arguments, "--url", url)[0] == 0
    same(folder, in_process)


TOKENS = ["--tokenizer", str(BASE)]
TEXT = ["--api", "chat", "--context.budget", "220", "--context.threshold", "60"]


def evaluate_without(missing: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process that can import none of the modules `missing`."""
    script = (
        f"import sys; sys.modules |= dict.fromkeys({missing}); from compactionrl.cli import main; main(sys.argv[1:])"
    )
    return subprocess.run(
        [sys.executable, "-c", script, "eval", str(DEMO), *arguments],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("arguments", "needed"), [(TOKENS, ["transformers"]), (TEXT, [])], ids=["tokens", "text"])
def test_who_measures_served_models_needs_little(tmp_path: Path, arguments: list[str], needed: list[str]) -> None:
    """Neither torch nor anything else of the extras, but for what reads a tokenizer."""
    short = ["--limit", "1", "--modes", "x1", "--limits.turns", "2", "--output", str(tmp_path / "r")]
    with serving(BASE) as url:
        ran = evaluate_without([name for name in EXTRAS if name not in needed], "--url", url, *arguments, *short)
    assert ran.returncode == 0, ran.stderr
    assert results(tmp_path / "r")["arms"]["x1"]["n"] == 1


@pytest.mark.parametrize(("missing", "extra"), [("transformers", "eval"), ("torch", "train")])
def test_what_is_missing_is_named_with_the_extra_that_has_it(tmp_path: Path, missing: str, extra: str) -> None:
    """The tokenizer of a served model, and the model in this process."""
    with serving(BASE) as url:
        where = ["--url", url, *TOKENS] if missing == "transformers" else []
        ran = evaluate_without([missing], *where, "--output", str(tmp_path / "r"))
    assert ran.returncode == 2
    assert f"{missing} is not installed" in ran.stderr
    assert f"'compactionrl[{extra}]'" in ran.stderr


ROOMY = ["--context.budget", "400", "--context.threshold", "140", "--limit", "3", "--limits.turns", "12"]
"""For windows of text, which take more pieces than tokens."""


def test_an_endpoint_that_takes_text_is_measured_approximately(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with serving(BASE) as url:
        arguments = [*ROOMY, "--url", url, "--api", "chat", "--modes", "x1,x4", "--output", str(tmp_path / "r")]
        code, out, err = evaluate(capsys, *arguments)
    assert code == 0, err
    assert "Budgets are approximate" in out
    found = results(tmp_path / "r")
    assert (found["about"]["agent"], found["about"]["exact"]) == ("tiny", False)
    assert {arm["n"] for arm in found["arms"].values()} == {3}
    rollouts = list(read_rollouts(tmp_path / "r" / "rollouts.jsonl.gz"))
    assert all(rollout.approximate for rollout in rollouts)
    # The server counts its tokens; those are the ones that are reported, not our pieces of text.
    for name, arm in found["arms"].items():
        turns = [t for r in rollouts if r.id.startswith(f"{name}-") for w in r.windows for t in w.turns if t.reported]
        tokens = [arm["tokens"][kind] for kind in ("responses", "summaries")]
        assert sum(each["sampled"] for each in tokens) >= sum(t.reported.completion for t in turns if t.reported) > 0
        assert sum(each["requests"] for each in tokens) >= len(turns) > 0
    assert evaluate(capsys, *arguments)[0] == 0  # what is stored reads back

    with pytest.raises(SystemExit):
        main(["rollout", "--from", str(tmp_path / "r"), "--id", "x4-heldout-0"])
    assert "say next until end" in capsys.readouterr().out


def test_a_summariser_with_another_tokenizer_gets_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, smollm2: Path
) -> None:
    small = {"sampling.concurrency": 4, "model.renderer": "chatml"}
    with serving(smollm2, name="smollm2", **small) as url:
        code, _, err = evaluate(
            capsys,
            *("--limit", "1", "--modes", "x4", "--context.summary_attempts", "1", "--summariser", url),
            *("--summariser-model", "smollm2", "--output", str(tmp_path / "r")),
        )
    assert code == 0, err
    found = results(tmp_path / "r")
    assert found["about"]["summarisers"] == {"smollm2": "smollm2, from text"}
    assert found["arms"]["x4+smollm2"]["compactions"] > 0
