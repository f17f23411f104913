"""The locks are complete, consistent with setup.py, and what is installed here."""

import ast
import importlib.metadata
import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_ext.versions import compare_installed, detect_hardware, pinned_version, read_lock

ROOT = Path(__file__).resolve().parents[2]

# By path: verl installs a package that is called `scripts` too.
_spec = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
lock = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lock)


def pins(hardware: str) -> dict[str, Requirement]:
    return {canonicalize_name(pin.name): pin for pin in read_lock(ROOT / "requirements" / f"{hardware}.txt")}


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_installed_versions_are_the_locked_ones(hardware):
    here = detect_hardware()
    if hardware != here:
        pytest.skip(f"this is a {here} machine, so requirements/{hardware}.txt is not what is installed")
    wrong = compare_installed(pins(hardware).values())
    assert not wrong, "\n".join([*wrong, "Run: bash scripts/setup_env.sh"])


def test_difference_names_the_package_and_both_versions():
    installed = importlib.metadata.version("packaging")
    assert compare_installed([Requirement("packaging==0.1")]) == [f"packaging: installed {installed}, locked 0.1"]
    assert compare_installed([Requirement("no-such-package==2.0")]) == ["no-such-package: not installed, locked 2.0"]
    assert compare_installed([Requirement(f"packaging=={installed}")]) == []
    assert compare_installed([Requirement("packaging==0.1 ; python_version < '3'")]) == []


def test_cpu_lock_is_what_lock_py_writes_from_this_environment():
    if detect_hardware() != "cpu":
        pytest.skip("the CPU lock is written from an installed CPU stack, and this is a gpu machine")
    command = [sys.executable, "scripts/lock.py", "cpu", "--check"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # this checkout's verl_ext, whichever is installed
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_cpu_lock_holds_nothing_of_cuda():
    names = pins("cpu")
    assert pinned_version(names["torch"]).endswith("+cpu")
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "cupy", "triton", "flash-attn"))]


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_every_requirement_of_setup_py_is_pinned_within_its_range(hardware):
    pinned = pins(hardware)
    for requirement in lock.read_requirements(hardware):
        pin = pinned.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement} of setup.py is not in requirements/{hardware}.txt"
        version = pinned_version(pin)
        assert requirement.specifier.contains(version), f"setup.py has {requirement}, {hardware}.txt has {version}"


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_lock_is_made_from_what_pip_installs_with_the_extras(hardware, monkeypatch):
    given = {}
    monkeypatch.setattr("setuptools.setup", given.update)
    monkeypatch.setattr("setuptools.find_namespace_packages", lambda include: [])
    runpy.run_path(str(ROOT / "setup.py"))
    extras = given["extras_require"]
    installed = given["install_requires"] + extras[hardware] + extras["test"] + extras["docs"] * (hardware == "cpu")
    assert sorted(map(str, lock.read_requirements(hardware))) == sorted(str(Requirement(r)) for r in installed)


def test_gpu_lock_is_the_matrix_that_verl_names():
    matrix = {
        canonicalize_name(r.name): r
        for r in map(Requirement, importlib.metadata.requires("verl"))
        if r.marker and any(r.marker.evaluate({"extra": e}) for e in ("vllm", "flash-attn-cu130torch211"))
    }
    for name in ("torch", "vllm", "transformers", "flash-attn"):
        version = pinned_version(pins("gpu")[name])
        assert str(matrix[name].specifier) == f"=={version}", f"verl names {matrix[name]}, gpu.txt has {version}"


def test_a_line_that_is_no_pin_is_refused(tmp_path):
    path = tmp_path / "bad.txt"
    for text in ("torch>=2.13", "torch", "torch==2.13,!=2.14", "torch==2.*"):
        path.write_text(f"# comment\n\n{text}\n")
        with pytest.raises(ValueError, match="is not a pin"):
            read_lock(path)


def test_walk_follows_extras_and_markers_and_stops_at_what_is_left_out():
    metadata = {
        "a": ["b[fast]>=1", "c; python_version < '3.12'", "d; extra == 'never'"],
        "b": ["e; extra == 'fast'", "f", "g; extra == 'slow'"],
        "c": [],
        "e": [],
        "f": [],
    }
    everything = {"a": {"setup.py"}, "b": {"a"}, "c": {"a"}, "e": {"b"}, "f": {"b"}}
    roots = [Requirement("a")]
    assert lock.walk(roots, "3.11", metadata.__getitem__, ()) == everything
    assert set(lock.walk(roots, "3.12", metadata.__getitem__, ())) == {"a", "b", "e", "f"}
    assert set(lock.walk(roots, "3.12", metadata.__getitem__, {"b[fast]"})) == {"a", "b", "f"}
    assert set(lock.walk(roots, "3.12", metadata.__getitem__, {"b"})) == {"a"}
    with pytest.raises(SystemExit, match="a requires b"):
        lock.walk(roots, "3.12", {"a": ["b"]}.__getitem__, ())


def test_every_import_of_ours_is_declared_in_setup_py():
    declared = {canonicalize_name(r.name) for e in ("cpu", "gpu") for r in lock.read_requirements(e)}
    declared.add("gguf")  # requirements/small.txt: data/small/build_model.py unpacks it where it needs it
    of_data = [*(ROOT / "data").rglob("*.py")]
    ours = {"verl_ext", "scripts", "data", "tests", *(path.stem for path in of_data), *(p.parent.name for p in of_data)}
    owners = importlib.metadata.packages_distributions()
    undeclared = []
    files = {p for folder in ("verl_ext", "data", "scripts") for p in (ROOT / folder).rglob("*.py")}
    for path in files - {ROOT / "scripts" / "bench" / "trl_side.py"}:  # runs in TRL's environment, requirements/trl.txt
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - ours:
                if not {canonicalize_name(d) for d in owners.get(top, [top])} & declared:
                    undeclared.append(f"{path.relative_to(ROOT)} imports {top}")
    assert not undeclared, f"add a line with its reason to setup.py: {undeclared}"
