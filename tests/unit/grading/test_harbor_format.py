"""Folders of Harbor's form become tasks; every field is used, or refused by its name."""

from pathlib import Path

import pytest

from goaly.grading.harbor_format import HarborSettings, read_harbor
from goaly.grading.task import TaskProblem, TaskSeconds
from goaly.grading.task import TestScript as Script
from goaly.sandboxes.contract import Limits
from tests.unit.grading.harbor_folders import CONFIG, FILES, write_harbor


def test_a_folder_becomes_a_task(tmp_path: Path) -> None:
    task = read_harbor(write_harbor(tmp_path))
    assert (task.id, task.problem) == ("acme/count-lines", FILES["instruction.md"])
    assert (task.image, task.root, task.workdir) == (str(tmp_path / "environment"), None, "/srv/app")
    assert task.tests == Script(
        files={"test.sh": FILES["tests/test.sh"].encode(), "data/more.txt": b"x\n"}, environment={"EXPECTED": "3"}
    )
    assert task.environment == {"MODE": "plain"}
    assert task.artifacts == ("/var/out", "/srv/app/notes.txt")
    assert task.limits == Limits(cpus=2, memory_mib=512, disk_mib=256)
    assert task.seconds == TaskSeconds(setup=30.0, agent=90.0, grading=45.5)
    assert task.metadata == {"description": "Counts.", "keywords": "[text]", "difficulty": "easy"}
    assert task.solution == "#!/bin/sh\nexport ANSWER='it'\"'\"'s 3'\n" + FILES["solution/solve.sh"].partition("\n")[2]
    assert task.solution_files == {"notes.md": b"count\n"}


def test_fields_that_are_left_out_have_the_defaults(tmp_path: Path) -> None:
    write_harbor(
        tmp_path / "one", task_toml='version = "1.0"\n[environment]\nworkdir = "/w"\ndocker_image = "acme/one"\n'
    )
    task = read_harbor(tmp_path / "one")
    assert (task.id, task.image, task.workdir) == ("one", "acme/one", "/w")
    assert (task.limits, task.seconds) == (None, TaskSeconds())


def test_a_root_takes_the_place_of_the_image_and_gets_the_files_beside_the_dockerfile(tmp_path: Path) -> None:
    task = read_harbor(write_harbor(tmp_path), root=Path("/"))
    assert (task.image, task.root, task.repository.path) == (None, Path("/"), tmp_path / "environment")


def test_sizes_of_older_tasks_are_read(tmp_path: Path) -> None:
    config = CONFIG.replace("memory_mb = 512", 'memory = "2G"').replace("storage_mb = 256", 'storage = "512m"')
    assert read_harbor(write_harbor(tmp_path, task_toml=config)).limits == Limits(cpus=2, memory_mib=2048, disk_mib=512)


def test_variables_are_those_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_harbor(tmp_path)
    monkeypatch.setenv("GOALY_TEST_MODE", "fast")
    assert read_harbor(tmp_path).environment == {"MODE": "fast"}
    monkeypatch.delenv("GOALY_TEST_MODE")
    write_harbor(tmp_path, task_toml=CONFIG.replace("${GOALY_TEST_MODE:-plain}", "${GOALY_TEST_MODE}"))
    with pytest.raises(TaskProblem, match=r"environment\.env\.MODE=.*: the variable GOALY_TEST_MODE is not set"):
        read_harbor(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "acme/count-lines"', "name = 7", "task.name=7: must be of type str"),
        ('description = "Counts."', 'title = "Counts."', "task.title=Counts.: Harbor has no such field"),
        ('schema_version = "1.4"', 'schema_version = "2.0"', "schema_version=2.0: must be one of 1.0"),
        ('schema_version = "1.4"', 'multi_step_reward_strategy = "mean"', "multi_step_reward_strategy=mean: asks for"),
        ("gpus = 0", "gpus = 1", "environment.gpus=1: asks for GPUs"),
        ("gpus = 0", 'gpu_types = ["H100"]', "environment.gpu_types=[H100]: asks for GPUs"),
        ("gpus = 0", 'tpu = { type = "v6e", topology = "2x2" }', "environment.tpu={type: v6e"),
        ("gpus = 0", 'os = "Windows"', "environment.os=Windows: must be linux"),
        ("gpus = 0", 'skills_dir = "/skills"', "environment.skills_dir=/skills: asks for skills"),
        ("gpus = 0", 'healthcheck = { command = "true" }', "environment.healthcheck={command: true}: asks for"),
        ("gpus = 0", 'mcp_servers = [{ name = "x" }]', "environment.mcp_servers=[{name: x}]: asks for"),
        ("timeout_sec = 90", 'user = "bob"', "agent.user=bob: asks for the agent as another user"),
        ("timeout_sec = 45.5", 'user = "bob"', "verifier.user=bob: asks for the tests as another user"),
        ("timeout_sec = 45.5", "environment = { cpus = 1 }", "verifier.environment={cpus: 1}: asks for a container"),
        ("timeout_sec = 45.5", 'collect = [{ command = "x" }]', "verifier.collect=[{command: x}]: asks for commands"),
        ("timeout_sec = 45.5", 'environment_mode = "both"', "verifier.environment_mode=both: must be shared or"),
        ("timeout_sec = 45.5", "timeout_sec = 0", "the time limit of grading is 0 s, must be above 0"),
        ("memory_mb = 512", 'memory = "much"', "environment.memory=much: must be a size as 2G"),
        ("cpus = 2", "cpus = -1", "cpus=-1: must be above 0"),
        ('"/var/out"', '"/var/../out"', "artifacts[0].source=/var/../out: must be a path without"),
        ('source = "notes.txt"', 'source = "n", exclude = ["*.o"]', "artifacts[1].exclude=[*.o]: cannot be kept"),
        ('source = "notes.txt"', 'source = "n", service = "db"', "artifacts[1].service=db: cannot be kept"),
        ('"no-network"', '"public"', "environment.network_mode=public: asks for network"),
        ('network_mode = "no-network"', "allow_internet = true", "environment.allow_internet=true: asks for network"),
        ("timeout_sec = 90", 'network_mode = "allowlist"', "agent.network_mode=allowlist: asks for network"),
        ("[solution]", "[[steps]]\nname = 'a'\n[solution]", "steps=[{name: a}]: asks for a task of several steps"),
        ("[solution]", "[solution", "not TOML"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_field(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in CONFIG
    write_harbor(tmp_path, task_toml=CONFIG.replace(old, new))
    with pytest.raises(TaskProblem) as caught:
        read_harbor(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'task.toml'}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_task_that_asks_for_network_is_taken_without_it_if_settings_say_so(tmp_path: Path) -> None:
    write_harbor(tmp_path, task_toml=CONFIG.replace('"no-network"', '"public"'))
    assert read_harbor(tmp_path, HarborSettings(offline=True)).id == "acme/count-lines"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("environment/docker-compose.yaml", "several containers"),
        ("trajectory.json", "a chat that goes on"),
        ("tests/test.bat", "Windows"),
    ],
)
def test_files_that_ask_for_more_are_refused_by_their_names(tmp_path: Path, name: str, says: str) -> None:
    (write_harbor(tmp_path) / name).write_text("x")
    with pytest.raises(TaskProblem, match=f"{name}: {says} cannot be had here"):
        read_harbor(tmp_path)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("environment__Dockerfile", r"needs environment/Dockerfile, or environment\.docker_image"),
        ("tests__test_sh", r"needs tests/test\.sh"),
        ("instruction_md", r"instruction\.md: cannot be read"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, missing: str, says: str) -> None:
    write_harbor(tmp_path, **{missing: None})
    with pytest.raises(TaskProblem, match=says):
        read_harbor(tmp_path)


def test_a_task_without_a_solution_is_read(tmp_path: Path) -> None:
    assert read_harbor(write_harbor(tmp_path, solution__solve_sh=None)).solution is None


@pytest.mark.parametrize("dockerfile", ["FROM debian\n", "FROM debian\nWORKDIR $HOME/app\n"])
def test_a_working_folder_that_nobody_names_is_asked_for(tmp_path: Path, dockerfile: str) -> None:
    write_harbor(tmp_path, environment__Dockerfile=dockerfile)
    with pytest.raises(TaskProblem, match=r"environment\.workdir must name the folder"):
        read_harbor(tmp_path)
