"""Harbor's task folders, schema 1.4: `read` gives a task, `write` a folder that Harbor can run.

    task.toml  instruction.md  environment/Dockerfile ...  tests/test.sh ...  solution/solve.sh ...

A box has the machine's own tools and no network. What a folder asks for beyond that is refused by name, with what to do
about it; metadata, and limits that a box may undercut, are not. The tests always run in a second, clean box, as with
Harbor's `environment_mode = "separate"`, so what crosses over are the artifacts, and without any the working directory.
"""

import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from verl_ext.tasks import archive
from verl_ext.tasks.archive import Entry, File, Folder
from verl_ext.tasks.task import MOST_VERIFIER_S, WRITABLE, BoxTask, check_files, is_below

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
# Images whose tools a machine that runs this package has, or whose lack the gold solution shows.
BASES = re.compile(r"(docker\.io/)?(library/)?(python|debian|ubuntu|buildpack-deps)(:[\w.\-]+)?")
MOST_MEMORY_MB, MOST_DISK_MB = 4096, 512  # of a box; a folder's larger limits are lowered to these
IMAGE = "image.tar.gz"  # in environment/ of a folder that `write` made: modes, links and empty folders stay
INNER = "tests/test.inner.sh"  # the test of a task whose exit code counts, in such a folder
OURS = "verl_retool"  # the table of [metadata] with what Harbor has no key for
_REWARD = """#!/bin/bash
mkdir -p /logs/verifier
if ( {command} ); then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
_TOP = {"schema_version", "version", "task", "metadata", "source", "artifacts", "agent", "verifier", "environment"}
_TOP |= {"solution"}
# Keys that are honoured, or that a box may ignore. All others are refused unless they are empty.
_KNOWN = {
    "agent": {"timeout_sec"},
    "verifier": {"timeout_sec", "environment_mode"},
    "solution": set(),
    "environment": {"build_timeout_sec", "cpus", "memory_mb", "memory", "storage_mb", "storage", "workdir"},
}
_REMEDIES = {
    "docker_image": "a box has the machine's tools; remove it if the task needs no others",
    "allow_internet": "a box has no network; set it to false if the task needs none",
    "network_mode": 'a box has no network; set it to "no-network" if the task needs none',
    "allowed_hosts": "a box has no network; remove it if the task needs none",
    "gpus": "a box has no GPU; set it to 0 if the task needs none",
    "os": 'a box runs Linux; set it to "linux"',
    "user": "all of a box runs as one user, `agent`; remove it if the task allows that",
    "env": "a box has a fixed environment; set variables in the scripts",
    "environment": "the tests run in a box like the agent's; remove it if they need no more",
    "collect": "nothing runs after the agent; let the tests do it",
    "steps": "a task has one step; make a task of each",
    "healthcheck": "nothing runs in a box before the agent's first command; remove it if the task allows that",
    "mcp_servers": "the agent has bash and an editor; remove it if the task needs no other tools",
}
_HARMLESS = {("environment", "os"): "linux", ("environment", "network_mode"): "no-network"}
_HARMLESS |= {("agent", "user"): "agent", ("agent", "network_mode"): "no-network"}
_HARMLESS |= {("verifier", "network_mode"): "no-network"}
_UNITS = {"k": 2**-10, "m": 1, "g": 2**10, "t": 2**20}  # MB


class NotHonoured(ValueError):
    """A folder is no task of Harbor's, or asks for what a box does not have; the message names it."""


def read(folder: Path) -> BoxTask:
    """Return the task of a folder.

    Raises:
        NotHonoured: see there.
    """
    where = str(folder)
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise NotHonoured(f"{where} is no task of Harbor's: {error}. Expected task.toml and instruction.md.") from error
    _check(config, where)
    try:
        return _task(folder, config, instruction)
    except (ValueError, TypeError, OSError) as error:
        raise NotHonoured(f"{where}: {error}") from error


def folders_in(path: Path) -> list[Path]:
    """Return the folders of tasks at or below a path, by name.

    Raises:
        NotHonoured: there is none.
    """
    if found := sorted(each.parent for each in path.rglob("task.toml")):
        return found
    raise NotHonoured(f"{path} has no folder with a task.toml. Name a folder of Harbor's tasks.")


def _check(config: Mapping[str, Any], where: str) -> None:
    version = str(config.get("schema_version", config.get("version", "1.0")))
    if version not in VERSIONS:
        raise NotHonoured(f"{where}: schema_version is {version!r}; {', '.join(VERSIONS)} are known.")
    asked: dict[tuple[str, ...], Any] = {(key,): value for key, value in config.items() if key not in _TOP}
    for table, known in _KNOWN.items():
        for key, value in (config.get(table) or {}).items():
            if key not in known and _HARMLESS.get((table, key)) != value:
                asked[table, key] = value
    for names, value in asked.items():
        if value in (None, False, 0, "", [], {}):
            continue
        remedy = _REMEDIES.get(names[-1], "nothing here knows what it asks for; remove it if the task can do without")
        raise NotHonoured(f"{where}: {'.'.join(names)} = {value!r:.80} cannot be honoured: {remedy}.")


def _task(folder: Path, config: Mapping[str, Any], instruction: str) -> BoxTask:
    agent, verifier, environment = (config.get(name) or {} for name in ("agent", "verifier", "environment"))
    metadata = config.get("metadata") or {}
    ours = metadata.get(OURS) or {}
    if (folder / "tests" / "Dockerfile").exists():
        raise NotHonoured("tests/Dockerfile: the tests run in a box like the agent's; remove it if they need no more.")
    workdir, image = _image(folder / "environment")
    workdir = environment.get("workdir") or workdir
    tests, solution = (_folder(folder, name) for name in ("tests", "solution"))
    if ours.get("result") == "exit_code":
        command, result = ours["command"], "exit_code"
        tests.pop("tests/test.sh", None)
        if inner := tests.pop(INNER, None):
            tests["tests/test.sh"] = inner
    else:
        command, result = BoxTask.command, "reward_file"
        if "tests/test.sh" not in tests:
            raise NotHonoured("it has no tests/test.sh, which Harbor runs.")
    task = BoxTask(
        name=str((config.get("task") or {}).get("name") or folder.name),
        instruction=instruction,
        image=archive.pack(image) if image else b"",
        tests=archive.pack(tests) if tests else b"",
        command=command,
        result=result,
        artifacts=_artifacts(config, verifier, workdir),
        workdir=workdir,
        solution=archive.pack(solution) if solution else b"",
        agent_s=agent.get("timeout_sec") or BoxTask.agent_s,
        command_s=ours.get("command_s", BoxTask.command_s),
        verifier_s=min(verifier.get("timeout_sec") or BoxTask.verifier_s, MOST_VERIFIER_S),
        memory_mb=min(_megabytes(environment, "memory", BoxTask.memory_mb), MOST_MEMORY_MB),
        disk_mb=min(_megabytes(environment, "storage", BoxTask.disk_mb), MOST_DISK_MB),
        kind=str(metadata.get("category") or ""),
        difficulty=str(metadata.get("difficulty") or ""),
    )
    check_files(task)
    return task


def _artifacts(config: Mapping[str, Any], verifier: Mapping[str, Any], workdir: str) -> tuple[str, ...]:
    """Return what the tests may see: of "separate" the folder's own artifacts, else the working directory, too."""
    declared = []
    for each in config.get("artifacts") or []:
        source = each if isinstance(each, str) else each.get("source")
        if not isinstance(each, str) and each.keys() - {"source"}:
            raise NotHonoured(f"the artifact {each!r:.100} has more than a source; name its path alone.")
        if not is_below(source, WRITABLE):
            raise NotHonoured(f"the artifact {source!r} is not below {', '.join(WRITABLE)}; have it written there.")
        declared.append(source)
    is_separate = verifier.get("environment_mode", "shared") == "separate"
    return tuple(dict.fromkeys(declared if is_separate and declared else [workdir, *declared]))


def _folder(folder: Path, name: str) -> dict[str, Entry]:
    """Return the files of a folder, and its folders without any."""
    if not (folder / name).is_dir():
        return {}
    found = archive.unpack(archive.pack(folder / name, name))
    parents = {str(parent) for path in found for parent in PurePosixPath(path).parents}
    return {path: each for path, each in found.items() if path not in parents}


def _megabytes(environment: Mapping[str, Any], name: str, default: int) -> int:
    """Return a limit, from a number of MB or an older schema's "2G"."""
    if number := environment.get(f"{name}_mb"):
        return int(number)
    if not (text := environment.get(name)):
        return default
    if not (match := re.fullmatch(r"([\d.]+)\s*([kmgt])i?b?", str(text).strip().lower())):
        raise NotHonoured(f'{name} = {text!r} is no size; expected one such as "2G".')
    return max(1, int(float(match[1]) * _UNITS[match[2]]))


# Dockerfile ----------------------------------------------------------------------------------------------------------


def _image(folder: Path) -> tuple[str, dict[str, Entry]]:
    """Return the working directory and the files that a Dockerfile of FROM, WORKDIR, COPY and ADD makes."""
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / name).exists():
            raise NotHonoured(f"environment/{name}: a box is one machine; put its files there by a Dockerfile.")
    workdir, files = "/app", dict[str, Entry]()
    if not (folder / "Dockerfile").is_file():
        return workdir, files
    for number, words in _instructions((folder / "Dockerfile").read_text(encoding="utf-8")):
        what, *rest = words
        match what.upper():
            case "FROM" if len(rest) == 1 and BASES.fullmatch(rest[0]):
                continue
            case "LABEL" | "CMD" | "ENTRYPOINT" | "MAINTAINER":
                continue
            case "WORKDIR" if len(rest) == 1:
                workdir = _joined(workdir, rest[0])
            case "COPY" | "ADD" if len(rest) >= 2 and not rest[0].startswith(("--", "[")):
                files |= _copied(folder, rest[:-1], rest[-1], workdir, unpacks=what.upper() == "ADD")
            case _:
                raise NotHonoured(
                    f"environment/Dockerfile, line {number}: {' '.join(words)[:100]!r} cannot be honoured. A box has "
                    "the machine's own tools; it knows FROM python, debian or ubuntu, WORKDIR, COPY and ADD of files "
                    "in environment/. Put what the line makes into a file and copy that, or leave it out."
                )
    return workdir, files


def _instructions(text: str) -> Iterator[tuple[int, list[str]]]:
    pending, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or pending):
            continue
        first = first if pending else number
        pending += line.rstrip().removesuffix("\\") + " "
        if not line.rstrip().endswith("\\"):
            try:
                yield first, shlex.split(pending)
            except ValueError as error:
                raise NotHonoured(f"environment/Dockerfile, line {first}: {error}.") from error
            pending = ""


def _joined(workdir: str, path: str) -> str:
    return str(PurePosixPath(workdir) / path)


def _copied(folder: Path, sources: list[str], target: str, workdir: str, *, unpacks: bool) -> dict[str, Entry]:
    is_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
    place = PurePosixPath(_joined(workdir, target)).as_posix().lstrip("/")
    copied: dict[str, Entry] = {}
    for source in sources:
        path = (folder / source).resolve()
        if not path.is_relative_to(folder.resolve()) or not path.exists():
            raise NotHonoured(f"environment/Dockerfile: there is no file {source!r} in environment/ to copy.")
        if path.is_dir():
            below = archive.unpack(archive.pack(path))
            copied |= {f"{place}/{name}".lstrip("/"): entry for name, entry in below.items()}
        elif unpacks and path.name.endswith((".tar.gz", ".tgz")):
            copied |= {f"{place}/{name}".lstrip("/"): each for name, each in archive.unpack(path.read_bytes()).items()}
        else:
            name = f"{place}/{path.name}" if is_folder else place
            copied[name.lstrip("/")] = File(path.read_bytes(), path.stat().st_mode & 0o777)
    return copied


# Writing -------------------------------------------------------------------------------------------------------------


def write(task: BoxTask, folder: Path) -> None:
    """Write a task as a folder that `read` gives back and Harbor runs, in place of a task that is there.

    Raises:
        ValueError: the folder is something else, a limit is above what `read` allows, or Harbor cannot run the command.
    """
    if task.result == "reward_file" and task.command != BoxTask.command:
        raise ValueError(f"task {task.name!r} runs {task.command!r:.80}; Harbor runs only {BoxTask.command!r}.")
    if task.memory_mb > MOST_MEMORY_MB or task.disk_mb > MOST_DISK_MB:
        raise ValueError(f"task {task.name!r}: at most {MOST_MEMORY_MB} MB of memory and {MOST_DISK_MB} MB of disk.")
    if folder.exists() and not (folder / "task.toml").is_file():
        raise ValueError(f"{folder} exists and is no task of Harbor's. Name another folder.")
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "environment").mkdir(parents=True)
    (folder / "instruction.md").write_text(f"{task.instruction}\n", encoding="utf-8")
    (folder / "task.toml").write_text(_toml(task), encoding="utf-8")
    lines = ["FROM python:3.11", f"WORKDIR {task.workdir}"]
    if task.image:
        (folder / "environment" / IMAGE).write_bytes(task.image)
        lines.append(f"ADD {IMAGE} /")
    (folder / "environment" / "Dockerfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tests = archive.unpack(task.tests)
    if task.result == "exit_code":
        if inner := tests.pop("tests/test.sh", None):
            tests[INNER] = inner
        command = task.command.replace("/tests/test.sh", f"/{INNER}") if INNER in tests else task.command
        tests["tests/test.sh"] = File(_REWARD.format(command=command).encode())
    for files in (tests, archive.unpack(task.solution)):
        _write_files(files, folder)


def _write_files(files: Mapping[str, Entry], folder: Path) -> None:
    for name, entry in sorted(files.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, File):
            path.write_bytes(entry.data)
            path.chmod(entry.mode)
        elif isinstance(entry, Folder):
            path.mkdir(exist_ok=True)
        else:
            path.symlink_to(entry.target)


def _toml(task: BoxTask) -> str:
    """Return task.toml; JSON's texts and lists are TOML's, too."""

    def value(of: Any) -> str:
        return json.dumps(of, ensure_ascii=False)

    return f"""schema_version = "1.4"
artifacts = {value(list(task.artifacts))}

[task]
name = {value(task.name)}

[metadata]
category = {value(task.kind)}
difficulty = {value(task.difficulty)}

[metadata.{OURS}]
result = {value(task.result)}
command = {value(task.command)}
command_s = {value(task.command_s)}

[agent]
timeout_sec = {value(float(task.agent_s))}

[verifier]
timeout_sec = {value(float(task.verifier_s))}
environment_mode = "separate"

[environment]
memory_mb = {value(task.memory_mb)}
storage_mb = {value(task.disk_mb)}
network_mode = "no-network"
workdir = {value(task.workdir)}
"""
