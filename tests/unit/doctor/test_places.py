"""Folders that a run writes to, and what its loggers sign in with."""

from pathlib import Path

import pytest

from verl_ext.doctor.finding import Level
from verl_ext.doctor.places import RAY_SOCKET, SOCKET_BYTES, check_loggers, check_output, check_temporary


def test_the_folder_of_a_run(make_run, told, tmp_path):
    assert list(check_output(make_run("tiny_dapo"))) == []
    (tmp_path / "file").write_text("")
    for folder in (f"{tmp_path}/file", f"{tmp_path}/file/run", "/proc/run"):
        run = make_run("tiny_sft", f"trainer.default_local_dir={folder}")
        text = told(check_output(run), Level.FAIL)[0]
        assert f"trainer.default_local_dir is {folder}, which cannot be written: " in text and "OUTPUT_DIR" in text
    assert not [*tmp_path.glob("tmp*")], "nothing is left of the try"


@pytest.mark.parametrize(
    ("name", "variable", "length", "is_well"),
    [
        ("tiny_dapo", "TMPDIR", 37, True),  # 107 - 70 bytes of Ray's socket
        ("tiny_dapo", "TMPDIR", 38, False),
        ("tiny_dapo", "RAY_TMPDIR", 38, False),
        ("tiny_sft", "TMPDIR", 75, True),  # 107 - 32 bytes of multiprocessing's
        ("tiny_sft", "TMPDIR", 76, False),
        ("tiny_sft", "RAY_TMPDIR", 90, True),
    ],
)
def test_sockets_have_short_paths(name, variable, length, is_well, make_run, told, monkeypatch):
    assert SOCKET_BYTES - len(RAY_SOCKET) == 37
    monkeypatch.setattr("verl_ext.doctor.places._why_not_writable", lambda folder: "")
    folder = "/tmp/" + "x" * (length - 5)
    found = list(check_temporary(make_run(name), {variable: folder}))
    if is_well:
        assert {each.level for each in found} == {Level.OK}
        return
    text = told(found, Level.FAIL)[0]
    assert (
        f"{variable} is {folder}, a path of {length} bytes, expected at most {length - 1}" in text and "AF_UNIX" in text
    )


def test_a_ray_cluster_that_already_runs_has_its_sockets(make_run, told, only_ok, monkeypatch):
    monkeypatch.setattr("verl_ext.doctor.places._why_not_writable", lambda folder: "")
    environment = {"RAY_TMPDIR": "/tmp/" + "x" * 33}  # 38 bytes, one more than Ray's sockets leave
    assert "that Ray creates in it" in told(check_temporary(make_run("tiny_dapo"), environment), Level.FAIL)[0]
    only_ok(check_temporary(make_run("tiny_dapo"), environment | {"RAY_ADDRESS": "10.0.0.1:6379"}))


def test_a_short_ray_folder_leaves_vllms_sockets(make_run, told):
    long = "/tmp/" + "x" * 70  # 107 - 37 = 70 bytes
    Path(long).mkdir(exist_ok=True)
    try:
        text = told(check_temporary(make_run("tiny_dapo"), {"TMPDIR": long, "RAY_TMPDIR": "/tmp"}), Level.FAIL)[0]
    finally:
        Path(long).rmdir()
    assert "sockets (AF_UNIX) that vLLM creates" in text


def test_a_temporary_folder_that_is_not_there(make_run, told, tmp_path):
    for name in ("tiny_dapo", "tiny_sft"):
        texts = told(check_temporary(make_run(name), {"TMPDIR": "/nowhere"}), Level.FAIL)
        assert len(texts) == 1 and "TMPDIR is /nowhere, which cannot be written: /nowhere: No such file" in texts[0]
        assert texts[0].endswith("-> Create the folder, or unset TMPDIR.")


WANDB = "trainer.logger=[console,wandb]"


@pytest.fixture
def home(tmp_path):
    return {"HOME": str(tmp_path)}


def test_wandb_without_a_key_would_end_the_run(make_run, told, home):
    text = told(check_loggers(make_run("tiny_dapo", WANDB), home), Level.FAIL)[0]
    assert "trainer.logger names wandb, which has no API key here" in text and "WANDB_MODE=offline" in text
    assert list(check_loggers(make_run("tiny_dapo"), home)) == []


@pytest.mark.parametrize(
    "environment",
    [
        {"WANDB_API_KEY": "x"},
        {"WANDB_MODE": "offline"},
        {"WANDB_MODE": "disabled"},
        {"WANDB_IDENTITY_TOKEN_FILE": "/token"},
    ],
)
def test_wandb_signs_in_by_a_variable_or_not_at_all(environment, make_run, home):
    assert list(check_loggers(make_run("tiny_dapo", WANDB), home | environment)) == []


def test_wandb_signs_in_by_the_file_of_its_login(make_run, told, home, tmp_path):
    run = make_run("tiny_dapo", WANDB)
    file = tmp_path / ".netrc"
    file.write_text("machine api.wandb.ai\n  login user\n  password x\n")
    assert list(check_loggers(run, home)) == []
    assert told(check_loggers(run, home | {"WANDB_BASE_URL": "https://wandb.example.org"}), Level.FAIL)
    elsewhere = file.rename(tmp_path / "elsewhere")
    assert told(check_loggers(run, home), Level.FAIL)
    assert list(check_loggers(run, home | {"NETRC": str(elsewhere)})) == []


@pytest.mark.parametrize("place", [".config/wandb", "wandb"])
@pytest.mark.parametrize("line", ["mode = offline", "api_key = x"])
def test_wandb_signs_in_by_its_settings(place, line, make_run, home, tmp_path):
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "settings").write_text(f"[default]\n{line}\n")
    assert list(check_loggers(make_run("tiny_dapo", WANDB), home)) == []


def test_a_logger_whose_package_is_missing(make_run, told, home, monkeypatch):
    run = make_run("qwen2-32b_dapo", "trainer.logger=[console,swanlab]")
    monkeypatch.setattr("verl_ext.doctor.places.find_spec", lambda name: None)
    assert "names swanlab, whose package is not installed" in told(check_loggers(run, home), Level.FAIL)[0]
