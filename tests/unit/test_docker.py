"""The Dockerfile is in step with what it installs, copies and starts. Whether it builds: docs/guides/docker.md."""

import json
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pytest

from verl_ext.versions import PYTHON_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "scripts" / "setup_env.sh").read_text()


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, in order, without comments; continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


def of(steps: list[tuple[str, str]], instruction: str) -> list[str]:
    return [arguments for name, arguments in steps if name == instruction]


@pytest.fixture(scope="module")
def packages(steps) -> set[str]:
    """Return what apt-get installs."""
    install = next(run for run in of(steps, "RUN") if "apt-get install" in run)
    return {word for word in install.partition("install")[2].partition("&&")[0].split() if not word.startswith("-")}


def test_one_supported_python_is_installed(packages):
    pythons = {name for name in packages if re.fullmatch(r"python3\.\d+", name)}
    assert len(pythons) == 1 and pythons <= {f"python{version}" for version in PYTHON_VERSIONS}
    assert {f"{name}-venv" for name in pythons} <= packages


def test_what_the_checks_of_setup_env_ask_for_is_installed(packages):
    python = next(name for name in packages if re.fullmatch(r"python3\.\d+", name))
    asked = {word for hint in re.findall(r"apt install ([^\",]+)", SETUP) for word in hint.split()}
    asked = {word.replace("python$version", python) for word in asked if word != "or"}
    asked = {re.sub(r"python3\.\d+", python, word) for word in asked if re.match(r"[a-z]+[+.\w-]*$", word)}
    named = {word for word in asked if word.startswith(("python", "gcc", "g++", "git"))}
    assert {"git", "gcc", "g++", python, f"{python}-venv"} <= named, named
    assert named <= packages


def test_the_stack_is_a_layer_of_its_own_with_all_that_its_fingerprint_reads(steps):
    order = [f"{name} {arguments}" for name, arguments in steps]
    install, everything = order.index("RUN bash scripts/setup_env.sh"), order.index("COPY . .")
    copied = {word for step in order[:install] if step.startswith("COPY") for word in step.split()[1:-1]}
    fingerprint = re.search(r'cat "\$LOCK" (.*) \| sha256sum', SETUP)[1]
    read = {word.strip('"').removeprefix("$ROOT/") for word in fingerprint.split()}
    assert read and {"requirements", "scripts/setup_env.sh", *read} <= copied, copied
    assert install < everything, "a change of code must not install anew"
    assert "RETOOL_HARDWARE=cpu" in " ".join(of(steps, "ENV")), "the fingerprint has it, too"
    assert (ROOT / "requirements" / "cpu.txt").is_file()


def test_the_default_command_is_the_quickstart(steps):
    assert [json.loads(command) for command in of(steps, "CMD")] == [["bash", "scripts/quickstart.sh"]]
    assert (ROOT / "scripts" / "quickstart.sh").is_file() and not of(steps, "ENTRYPOINT")


def test_the_image_is_for_the_wheels_processor_and_sets_no_user(steps):
    assert of(steps, "FROM") == ["--platform=linux/amd64 debian:bookworm-slim"]
    assert "Linux x86_64" in SETUP
    assert not of(steps, "USER"), "the sandbox's layer uid needs root (docs/guides/docker.md)"


def test_the_documents_name_the_images_folder(steps):
    (folder,) = of(steps, "WORKDIR")
    assert f"safe.directory {folder}" in " ".join(of(steps, "RUN"))
    for name in ("README.md", "docs/guides/docker.md"):
        mounted = re.findall(r"outputs:(\S+?)[\"']", (ROOT / name).read_text())
        assert mounted and set(mounted) == {f"{folder}/outputs"}, name


def patterns(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]


def test_what_git_ignores_stays_out_of_the_image():
    in_git = {line if line.startswith("/") else f"**/{line}" for line in patterns(".gitignore")}
    assert {line.removeprefix("/") for line in in_git} == set(patterns(".dockerignore"))


def test_every_tracked_file_and_gits_own_go_into_the_image():
    """A run records the revision; a tracked file that is missing would be a change of it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")

    def is_left_out(path: str) -> bool:
        parents = [str(parent) for parent in PurePosixPath(path).parents][:-1]
        names = {part: f"**/{PurePosixPath(part).name}" for part in (path, *parents)}
        return any(
            fnmatch(part, line.rstrip("/")) or fnmatch(any_depth, line.rstrip("/"))
            for line in patterns(".dockerignore")
            for part, any_depth in names.items()
        )

    assert is_left_out("outputs/quickstart/report.html") and is_left_out("a/__pycache__/b.pyc") and is_left_out("x.log")
    assert [path for path in [*listed.stdout.splitlines(), ".git/HEAD"] if is_left_out(path)] == []
