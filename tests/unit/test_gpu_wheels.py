"""scripts/gpu_wheels.py: what it splits is joined to the same bytes, and missing or broken parts are named."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "scripts" / "gpu_wheels.py"


def load():
    spec = importlib.util.spec_from_file_location("gpu_wheels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_wheels = load()
PART = 2**16 + 1000  # bytes, of which 2**16 are kept for the checksums
HERE = gpu_wheels.running_python()


@pytest.fixture
def whole(tmp_path) -> Path:
    """Three files: of 300, 500 and 2,500 bytes."""
    folder = tmp_path / "out" / "whole"
    folder.mkdir(parents=True)
    for name, size in {"a-1-py3-none-any.whl": 300, "b-2-py3-none-any.whl": 500, "c-3-py3-none-any.whl": 2500}.items():
        (folder / name).write_bytes(os.urandom(size))
    return folder


def split(whole: Path) -> tuple[Path, dict[str, bytes]]:
    contents = {path.name: path.read_bytes() for path in whole.iterdir()}
    out = whole.parent
    # 300 + 500 fit the first part, and 1000 of c do not; c's pieces are 1000, 1000 and 500
    assert gpu_wheels.split(whole, out, PART, HERE) == 4
    return out, contents


def test_no_part_is_too_large_and_small_files_come_first(whole):
    out, _ = split(whole)
    parts = {path.name: sorted(each.name for each in path.iterdir()) for path in sorted(out.iterdir())}
    assert parts == {
        "part-01": ["a-1-py3-none-any.whl", "b-2-py3-none-any.whl", "wheels.json"],
        "part-02": ["c-3-py3-none-any.whl.001", "wheels.json"],
        "part-03": ["c-3-py3-none-any.whl.002", "wheels.json"],
        "part-04": ["c-3-py3-none-any.whl.003", "wheels.json"],
    }
    assert all(sum(path.stat().st_size for path in part.iterdir()) <= PART for part in out.iterdir())


def test_what_was_split_is_joined_to_the_same_bytes(whole, tmp_path):
    out, contents = split(whole)
    seen = dict(gpu_wheels.available(out, tmp_path))
    assert {path.name: path.read_bytes() for path in seen} == contents and not any(seen.values())


def test_a_missing_piece_and_a_broken_file_are_named(whole, tmp_path):
    out, _ = split(whole)
    (out / "part-03" / "c-3-py3-none-any.whl.002").unlink()
    (out / "part-01" / "a-1-py3-none-any.whl").write_bytes(b"x" * 300)
    problems = [problem for path, problem in gpu_wheels.available(out, tmp_path) if path is None]
    assert problems == [
        "a-1-py3-none-any.whl: its checksum differs from that in wheels.json; send its parts again",
        f"c-3-py3-none-any.whl: c-3-py3-none-any.whl.002 is not in {out}",
    ]


@pytest.mark.parametrize("writes", range(1, 10))  # 5 files, 4 lists of checksums
def test_a_split_that_is_broken_off_leaves_no_half_part_and_is_done_again(whole, tmp_path, monkeypatch, writes):
    contents, left = {path.name: path.read_bytes() for path in whole.iterdir()}, iter(range(writes - 1))

    def stops_after(write):
        def written(*arguments):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return write(*arguments)

        return written

    with monkeypatch.context() as patch:
        for name in ("write_bytes", "write_text"):
            patch.setattr(Path, name, stops_after(getattr(Path, name)))
        with pytest.raises(KeyboardInterrupt):
            gpu_wheels.split(whole, whole.parent, PART, HERE)
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == contents
    complete = [part for part in whole.parent.glob("part-*") if (part / "wheels.json").is_file()]
    assert [*whole.parent.glob("part-*")] == complete
    out, _ = split(whole)
    assert {path.name for path in out.iterdir()} == {f"part-0{number}" for number in range(1, 5)}
    assert {path.name: path.read_bytes() for path, _ in gpu_wheels.available(out, tmp_path)} == contents


def test_parts_that_are_there_are_made_anew_only_where_make_was_broken_off(whole, monkeypatch, capsys):
    out = whole.parent
    (out / "part-01").mkdir()
    monkeypatch.setattr(gpu_wheels, "read_pins", lambda python: {"a": "1"})
    monkeypatch.setattr(sys, "argv", ["gpu_wheels.py", "make", "--out", str(out), "--python", "3.12"])
    assert gpu_wheels.main() == 0 and "1 packages in 1 parts" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="already has parts. Name another folder"):
        gpu_wheels.main()


def test_parts_for_another_python_are_refused_with_both_versions(whole, tmp_path):
    gpu_wheels.split(whole, whole.parent, PART, "3.10")
    with pytest.raises(SystemExit) as stop:
        gpu_wheels.install(whole.parent, tmp_path / "site")
    assert f"is for Python 3.10, but this is Python {HERE} ({sys.executable})" in str(stop.value)
    assert f"Run it with python3.10, or make the parts with --python {HERE}." in str(stop.value)


def test_parts_of_two_calls_are_not_mixed(whole, tmp_path):
    out, _ = split(whole)
    manifest = json.loads((out / "part-02" / "wheels.json").read_text())
    (out / "part-02" / "wheels.json").write_text(json.dumps(manifest | {"files": {}}))
    with pytest.raises(SystemExit, match="has parts of 2 calls of make; expected those of one"):
        [*gpu_wheels.available(out, tmp_path)]


def test_pins_are_those_of_the_lock_for_that_python(monkeypatch, tmp_path):
    lock = tmp_path / "gpu.txt"
    lock.write_text('# pins\nA_b.c==1.0 ; python_version == "3.11"  # x\nd==2.0+cu130  # y\n')
    monkeypatch.setattr(gpu_wheels, "LOCK", lock)
    assert gpu_wheels.read_pins("3.11") == {"a-b-c": "1.0", "d": "2.0+cu130"}
    assert gpu_wheels.read_pins("3.12") == {"d": "2.0+cu130"}


def test_every_pin_of_the_lock_is_read():
    from verl_ext.versions import read_lock

    pins = read_lock(REPO / "requirements" / "gpu.txt")
    for python in ("3.11", "3.12"):
        applies = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
        assert gpu_wheels.read_pins(python).keys() == {gpu_wheels.canonical(pin.name) for pin in applies}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("ray-2.60.0-cp312-cp312-manylinux2014_x86_64.whl", ("ray", "2.60.0")),
        ("antlr4_python3_runtime-4.9.3-py3-none-any.whl", ("antlr4-python3-runtime", "4.9.3")),
        ("torch-2.11.0+cu130-cp312-cp312-linux_x86_64.whl", ("torch", "2.11.0")),
        ("flash_attn-2.8.3.tar.gz", ("flash-attn", "2.8.3")),
    ],
)
def test_name_and_version_of_a_file(file, expected):
    assert gpu_wheels.identity(file) == expected


def make_wheel(folder: Path, name: str, version: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_install_takes_what_is_not_here_and_names_what_is_nowhere(tmp_path, monkeypatch, capfd):
    lock, folder, site = tmp_path / "gpu.txt", tmp_path / "wheels", tmp_path / "site"
    folder.mkdir()
    lock.write_text("retool-one==1.5\nretool-two==2.5\nretool-three==3.5\npytest==1\n")
    monkeypatch.setattr(gpu_wheels, "LOCK", lock)
    monkeypatch.setattr(gpu_wheels, "installed_version", {"pytest": "1"}.get)
    make_wheel(folder, "retool_one", "1.5")
    (folder / "retool_two-2.5.tar.gz").write_bytes(b"")
    (folder / "other_package-1-py3-none-any.whl").write_bytes(b"not in the lock, not installed")
    assert gpu_wheels.install(folder, site) == gpu_wheels.MISSING
    assert (site / "retool_one.py").is_file()
    said = capfd.readouterr().out
    assert f"1 of 4 packages of the lock are installed, 1 are in {folder}, 1 are missing: retool-three" in said
    assert "source archives, to be built: retool-two" in said
    (folder / "retool_three-3.5.tar.gz").write_bytes(b"")
    assert gpu_wheels.install(folder, None) == 0


def test_an_installation_that_fails_is_no_missing_package(tmp_path, monkeypatch):
    """pip refuses a file that is not an archive; the exit status of a SystemExit with a text is 1, MISSING is 3."""
    lock, folder = tmp_path / "gpu.txt", tmp_path / "wheels"
    folder.mkdir()
    lock.write_text("retool-one==1.5\nretool-two==2.5\n")
    monkeypatch.setattr(gpu_wheels, "LOCK", lock)
    (folder / "retool_one-1.5-py3-none-any.whl").write_bytes(b"no archive")
    with pytest.raises(SystemExit, match="pip install ended with exit status"):
        gpu_wheels.install(folder, tmp_path / "site")


def test_the_command_refuses_what_is_no_folder(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), "check", str(tmp_path / "no")], capture_output=True, text=True)
    assert done.returncode == 1 != gpu_wheels.MISSING
    assert done.stderr.strip() == f"gpu_wheels: {tmp_path / 'no'} is not a folder"


def test_the_checksums_of_the_whole_lock_fit(whole, monkeypatch):
    """About 240 files, each with a name of up to 100 letters."""
    for number in range(240):
        (whole / f"{'n' * 80}_{number}-1-py3-none-any.whl").write_bytes(b"x")
    gpu_wheels.split(whole, whole.parent, PART, "3.12")
    assert len(json.loads((whole.parent / "part-01" / "wheels.json").read_text())["files"]) == 243
