"""The locks are complete, consistent with pyproject.toml, and what is installed here."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_ext.versions import compare_installed, detect_hardware, pinned_version, read_lock

ROOT = Path(__file__).resolve().parents[2]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"cpu": ("training", "cpu", "test", "docs"), "gpu": ("training", "gpu", "test")}


def requirements(hardware: str) -> list[Requirement]:
    """Return what pyproject.toml asks for, with the extras that a lock is made for."""
    texts = [*PROJECT["dependencies"], *(r for e in EXTRAS[hardware] for r in PROJECT["optional-dependencies"][e])]
    return [Requirement(text) for text in texts if text != "verl-retool[training]"]


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


def test_what_is_installed_asks_for_nothing_that_the_cpu_lock_lacks():
    if detect_hardware() != "cpu":
        pytest.skip("the packages of the CPU lock are not installed on a gpu machine")
    pinned, left_out = pins("cpu"), (ROOT / "requirements" / "cpu_excludes.txt").read_text()
    names = {canonicalize_name(line.partition("#")[0].strip()) for line in left_out.splitlines()} - {""}
    missing = []
    for name, pin in pinned.items():
        if pin.marker is not None and not pin.marker.evaluate():
            continue
        for asked in map(Requirement, importlib.metadata.requires(name) or []):
            wanted = canonicalize_name(asked.name)
            if wanted in names or not (asked.marker is None or asked.marker.evaluate({"extra": ""})):
                continue
            if not (found := pinned.get(wanted)) or not asked.specifier.contains(pinned_version(found), True):
                missing.append(f"{name} asks for {asked}, locked is {found}")
    assert not missing


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_every_pin_but_torchs_cpu_build_has_hashes(hardware):
    text = (ROOT / "requirements" / f"{hardware}.txt").read_text()
    bare = re.findall(r"^([\w.-]+)==(?:(?! \\\n).)*$", text, re.MULTILINE)
    assert bare == ["torch"] * (hardware == "cpu")


def test_cpu_lock_holds_nothing_of_cuda():
    names = pins("cpu")
    assert pinned_version(names["torch"]).endswith("+cpu")
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "cupy", "triton", "flash-attn"))]


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_every_requirement_is_pinned_within_its_range(hardware):
    pinned = pins(hardware)
    for requirement in requirements(hardware):
        pin = pinned.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement} of pyproject.toml is not in requirements/{hardware}.txt"
        version = pinned_version(pin)
        assert requirement.specifier.contains(version), f"{requirement} is asked for, {hardware}.txt has {version}"


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


def test_every_import_of_ours_is_declared():
    declared = {canonicalize_name(r.name) for e in ("cpu", "gpu") for r in requirements(e)}
    declared.add("gguf")  # requirements/small.txt: data/small/build_model.py unpacks it where it needs it
    of_data = [*(ROOT / "data").rglob("*.py")]
    ours = {"verl_ext", "scripts", "data", "tests", *(path.stem for path in of_data), *(p.parent.name for p in of_data)}
    ours.add("_typeshed")  # which only the type checker has
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
    assert not undeclared, f"add a line with its reason to pyproject.toml: {undeclared}"
