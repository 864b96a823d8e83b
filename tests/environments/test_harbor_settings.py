"""task.toml: what says how to run and judge a task is read, what cannot be had here is refused, the rest is left alone."""

import pytest

from compactionrl.environments.harbor_settings import TaskFolderError, megabytes, read_settings, resolved

WHOLE = """
schema_version = "1.4"
artifacts = ["/app/out"]
[task]
name = "org/name"
[metadata]
difficulty = "hard"
[agent]
timeout_sec = 900
user = "nobody"
[verifier]
timeout_sec = 90.5
env = { KEY = "${KEY:-none}" }
user = 1000
[environment]
build_timeout_sec = 1200
docker_image = "someone/image:1"
os = "Linux"
cpus = 2
memory_mb = 4096
storage_mb = 10240
gpus = 0
workdir = "/srv"
network_mode = "no-network"
env = { A = "b" }
[solution]
env = { S = "t" }
"""


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "task.toml").write_text(text)
        return read_settings(tmp_path / "task.toml")

    return read


def test_a_whole_file(read):
    settings = read(WHOLE)
    environment = settings.environment
    assert settings.metadata == {"difficulty": "hard"}
    assert (settings.agent.timeout_sec, settings.agent.user) == (900, "nobody")
    assert (settings.verifier.timeout_sec, settings.verifier.user) == (90.5, 1000)
    assert (settings.verifier.env, settings.solution.env) == ({"KEY": "${KEY:-none}"}, {"S": "t"})
    assert (environment.cpus, environment.memory_mb, environment.storage_mb) == (2, 4096, 10240)
    assert (environment.workdir, environment.network_mode, environment.env) == ("/srv", "no-network", {"A": "b"})
    assert environment.build_timeout_sec == 1200


def test_what_is_not_said_has_harbors_defaults(read):
    settings = read("")
    assert (settings.agent.timeout_sec, settings.verifier.timeout_sec) == (None, 600)
    assert (settings.environment.build_timeout_sec, settings.environment.network_mode) == (600, None)


@pytest.mark.parametrize(
    ("older", "now"),
    [
        ('memory = "2G"\nstorage = "512M"', (2048, 512, None)),
        ("allow_internet = false", (None, None, "no-network")),
        ("allow_internet = true", (None, None, "public")),
        ('allow_internet = true\nnetwork_mode = "no-network"', (None, None, "no-network")),
    ],
)
def test_names_of_older_schemas(read, older, now):
    environment = read(f"[environment]\n{older}").environment
    assert (environment.memory_mb, environment.storage_mb, environment.network_mode) == now


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[environment]\nos = 'windows'", "environment.os"),
        ("[environment]\ngpus = 1", "environment.gpus"),
        ("[environment]\ncpus = 0", "environment.cpus"),
        ("[environment]\nmemory_mb = 'many'", "environment.memory_mb"),
        ("[environment]\nmemory = 'many'", "many"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a']", "environment.network_mode"),
        ("[[environment.mcp_servers]]\nname = 'x'", "environment.mcp_servers"),
        ("[environment.healthcheck]\ncommand = 'true'", "environment.healthcheck"),
        ("[environment.env]\nA = 1", "environment.env.A"),
        ("[verifier]\nenvironment_mode = 'separate'", "verifier.environment_mode"),
        ("[verifier.environment]\ncpus = 1", "verifier.environment"),
        ("[[verifier.collect]]\ncommand = 'x'", "verifier.collect"),
        ("[verifier]\ntimeout_sec = 0", "verifier.timeout_sec"),
        ("[verifier]\ntimeout_sec = inf", "verifier.timeout_sec"),
        ("[agent]\ntimeout_sec = nan", "agent.timeout_sec"),
        ("[agent]\nnetwork_mode = 'no-network'", "network_mode"),
        ("[[steps]]\nname = 'first'", "steps"),
        ("agent = 3", "agent"),
        ("[agent", "task.toml"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(read, text, named):
    with pytest.raises(TaskFolderError) as refused:
        read(text)
    assert named in str(refused.value)
    assert "task.toml" in str(refused.value)


def test_one_network_for_all(read):
    assert read("[environment]\nnetwork_mode = 'no-network'\n[agent]\nnetwork_mode = 'no-network'")


def test_sizes():
    assert [megabytes(size) for size in ("2G", "1.5 g", "512M", "2048K")] == [2048, 1536, 512, 2]


def test_variables_come_from_this_process(monkeypatch):
    monkeypatch.setenv("SET", "value")
    monkeypatch.delenv("UNSET", raising=False)
    given = {"A": "${SET}", "B": "${UNSET:-by default}", "C": "plain $SET", "D": "${SET:-x}", "E": "${UNSET:-}"}
    assert resolved(given) == {"A": "value", "B": "by default", "C": "plain $SET", "D": "value", "E": ""}
    with pytest.raises(TaskFolderError, match="UNSET"):
        resolved({"A": "${UNSET}"})
