"""Harbor's folders: what a box has is read, what it does not have is refused by name, and what we write comes back."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from verl_ext.settings import REPO
from verl_ext.tasks import archive, harbor, task
from verl_ext.tasks.archive import File, Folder, Link
from verl_ext.tasks.harbor import NotHonoured
from verl_ext.tasks.task import BoxTask

TOML = """
schema_version = "1.4"
artifacts = ["/app/out.txt", {source = "/home/agent/notes"}]
[task]
name = "org/count"
description = "Counts."
authors = [{name = "A", email = "a@example.com"}]
[metadata]
difficulty = "hard"
category = "text"
tags = ["x"]
[verifier]
timeout_sec = 90.0
environment_mode = "separate"
[agent]
timeout_sec = 120
[environment]
build_timeout_sec = 600.0
cpus = 2
memory = "2G"
storage_mb = 10240
gpus = 0
allow_internet = false
mcp_servers = []
[environment.env]
"""
DOCKERFILE = """# a comment
FROM python:3.12-slim-bookworm
LABEL owner="me"
WORKDIR /app/work
COPY data/ ./data/
COPY one.txt \\
     two.txt /app/
COPY run.sh /app/start.sh
CMD ["bash"]
"""


@pytest.fixture
def folder(tmp_path):
    """A task as its author wrote it."""
    files = {
        "task.toml": TOML,
        "instruction.md": "Count.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/data/a.csv": "1,2\n",
        "environment/one.txt": "1",
        "environment/two.txt": "2",
        "environment/run.sh": "true",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt",
        "tests/helpers/expected.txt": "3",
        "solution/solve.sh": "echo 3 > /app/out.txt",
    }
    for name, text in files.items():
        path = tmp_path / "count" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    (tmp_path / "count/environment/run.sh").chmod(0o755)
    return tmp_path / "count"


def test_a_folder_is_read(folder):
    found = harbor.read(folder)
    assert (found.name, found.instruction, found.result) == ("org/count", "Count.", "reward_file")
    assert (found.workdir, found.artifacts) == ("/app/work", ("/app/out.txt", "/home/agent/notes"))
    assert (found.agent_s, found.verifier_s, found.memory_mb, found.disk_mb) == (120, 90.0, 2048, harbor.MOST_DISK_MB)
    assert (found.kind, found.difficulty) == ("text", "hard")
    assert archive.unpack(found.image) == {
        "app/one.txt": File(b"1"),
        "app/start.sh": File(b"true", 0o755),
        "app/two.txt": File(b"2"),
        "app/work/data/a.csv": File(b"1,2\n"),
    }
    assert archive.unpack(found.tests).keys() == {"tests/test.sh", "tests/helpers/expected.txt"}
    assert archive.unpack(found.solution).keys() == {"solution/solve.sh"}


def test_without_a_separate_verifier_the_tests_see_the_working_directory_too(folder):
    changed(folder, 'environment_mode = "separate"', "")
    assert harbor.read(folder).artifacts == ("/app/work", "/app/out.txt", "/home/agent/notes")


def test_limits_above_those_of_a_box_are_lowered(folder):
    changed(folder, "timeout_sec = 90.0", "timeout_sec = 3600.0")
    changed(folder, '"2G"', '"1T"')
    found = harbor.read(folder)
    assert (found.verifier_s, found.memory_mb) == (300.0, harbor.MOST_MEMORY_MB)


def changed(folder: Path, old: str, new: str, file: str = "task.toml") -> None:
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"1.4"', '"2.0"', "schema_version is '2.0'"),
        ("cpus = 2", 'docker_image = "my/image:1"', "environment.docker_image = 'my/image:1' cannot be honoured"),
        ("allow_internet = false", "allow_internet = true", "environment.allow_internet = True"),
        ("cpus = 2", 'network_mode = "public"', "environment.network_mode = 'public'"),
        ("cpus = 2", 'allowed_hosts = ["pypi.org"]', "environment.allowed_hosts"),
        ("gpus = 0", "gpus = 1", "environment.gpus = 1"),
        ("cpus = 2", 'os = "windows"', "environment.os = 'windows'"),
        ("[environment.env]", "[environment.env]\nKEY = 'x'", "environment.env"),
        ("[environment.env]", "[environment.healthcheck]\ncommand = 'true'", "environment.healthcheck"),
        ("mcp_servers = []", "mcp_servers = [{name = 'x'}]", "environment.mcp_servers"),
        ("[agent]", "[agent]\nuser = 'root'", "agent.user = 'root'"),
        ("[verifier]", "[verifier]\nuser = 0\ncollect = [{command = 'x'}]", "verifier.collect"),
        ("[verifier]", "[verifier.environment]\ndocker_image = 'x'\n[verifier]", "verifier.environment"),
        ("[agent]", "[[steps]]\nname = 'one'\n[agent]", "steps = "),
        ("[agent]", "[solution.env]\nA = 'b'\n[agent]", "solution.env"),
        ("[agent]", "[agent]\nfresh = 'new'", "agent.fresh = 'new' cannot be honoured: nothing here knows"),
        ("/app/out.txt", "/logs/artifacts/out.txt", "the artifact '/logs/artifacts/out.txt' is not below"),
        ('{source = "/home', '{destination = "x", source = "/home', "has more than a source"),
        ('"2G"', '"much"', "memory = 'much' is no size"),
        ("[task]", "[task", "is no task of Harbor's"),
    ],
)
def test_what_a_box_does_not_have_is_refused_by_name(folder, old, new, named):
    changed(folder, old, new)
    with pytest.raises(NotHonoured) as told:
        harbor.read(folder)
    assert named in str(told.value) and str(folder) in str(told.value)


@pytest.mark.parametrize(
    "new",
    ['os = "linux"', 'network_mode = "no-network"', "skills_dir = ''", "[environment.healthcheck]", "gpu_types = []"],
)
def test_what_asks_for_nothing_is_not_refused(folder, new):
    changed(folder, "[environment.env]", new)
    assert harbor.read(folder).name == "org/count"


@pytest.mark.parametrize(
    ("new", "named"),
    [
        ("RUN apt-get install -y jq", "line 3: 'RUN apt-get install -y jq' cannot be honoured"),
        ("FROM nvidia/cuda:12", "line 3: 'FROM nvidia/cuda:12'"),
        ("COPY --from=build /x /app/x", "line 3: 'COPY --from=build"),
        ("COPY ../../secret /app/", "there is no file '../../secret' in environment/"),
        ("COPY one.txt /etc/one.txt", "image has 'etc/one.txt'"),
        ("ENV A=b", "line 3: 'ENV A=b'"),
        ("WORKDIR /srv", "workdir must be"),
    ],
)
def test_a_line_of_a_dockerfile_that_is_not_honoured_is_named(folder, new, named):
    lines = DOCKERFILE.replace("WORKDIR /app/work\n", "") if "WORKDIR" in new else DOCKERFILE
    (folder / "environment/Dockerfile").write_text(lines.replace('LABEL owner="me"', new))
    with pytest.raises(NotHonoured) as told:
        harbor.read(folder)
    assert named in str(told.value)


@pytest.mark.parametrize("name", ["environment/docker-compose.yaml", "tests/Dockerfile"])
def test_a_second_image_is_refused(folder, name):
    (folder / name).write_text("x")
    with pytest.raises(NotHonoured, match=name):
        harbor.read(folder)


TASKS = {
    "exit code": BoxTask(
        'count "lines"',
        'Count\nthe lines: é, \\ and "quotes".\n',
        image=archive.pack({"app/a": (b"1", 0o600), "app/empty": Folder(0o700), "app/link": Link("a")}),
        tests=archive.pack({"tests/test.sh": "test -e /app/b", "tests/deep/x.py": ("pass", 0o755)}),
        solution=archive.pack({"solution/solve.sh": "touch b"}),
        artifacts=("/app/b", "/tmp"),
        workdir="/app/sub",
        agent_s=61.5,
        command_s=7,
        memory_mb=300,
        disk_mb=33,
        kind="files",
        difficulty="easy",
    ),
    "reward file": BoxTask("r", "Do it.", tests=archive.pack({"tests/test.sh": "true"}), result="reward_file"),
    "own command": BoxTask(
        "c", "Do it.", tests=archive.pack({"tests/check.py": "1"}), command="python3 /tests/check.py"
    ),
    "nothing": BoxTask("n", "Do it.", command="test -e /app/x"),
}


@pytest.mark.parametrize("which", TASKS)
def test_what_is_written_is_read_as_the_same_task(tmp_path, which):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old.txt").write_text("of an earlier task")
    with pytest.raises(ValueError, match="exists and is no task of Harbor's"):
        harbor.write(TASKS[which], tmp_path / "out")
    (tmp_path / "out/task.toml").write_text("")
    harbor.write(TASKS[which], tmp_path / "out")
    assert harbor.read(tmp_path / "out") == TASKS[which]
    assert not (tmp_path / "out/old.txt").exists()


def test_what_harbor_would_not_run_as_we_do_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="Harbor runs only 'bash /tests/test.sh'"):
        harbor.write(BoxTask("x", "Do it.", command="true", result="reward_file"), tmp_path / "x")
    with pytest.raises(ValueError, match="at most 4096 MB"):
        harbor.write(BoxTask("x", "Do it.", memory_mb=5000), tmp_path / "x")


def prepare(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "data/prepare_harbor.py", *map(str, arguments)]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)


def test_the_script_makes_a_row_of_each_folder_and_names_those_that_it_refuses(folder, tmp_path):
    harbor.write(TASKS["nothing"], tmp_path / "other")
    out = tmp_path / "rows.parquet"
    ended = prepare(tmp_path, "--out", out, "--source", "mine")
    assert ended.returncode == 0, ended.stderr
    rows = pq.read_table(out).to_pylist()
    assert [task.of_row(row).name for row in rows] == ["org/count", "n"]
    assert {row["data_source"] for row in rows} == {"mine"} and json.loads(rows[0]["extra_info"]["task"])

    changed(folder, "gpus = 0", "gpus = 8")
    refused = prepare(tmp_path, "--out", out)
    assert refused.returncode == 1 and "environment.gpus = 8 cannot be honoured" in refused.stdout
    assert "1 of 2 tasks cannot be honoured. Correct them, or pass --skip." in refused.stderr
    assert prepare(tmp_path, "--out", out, "--skip").returncode == 0 and pq.read_table(out).num_rows == 1
