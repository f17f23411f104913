"""The command line: a tiny run whose inputs are all there, with a real sandbox server; and with a dead one."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from verl_ext.doctor.__main__ import main
from verl_ext.sandbox import running_server

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def inputs(tiny_tools, tokenizer, tmp_path_factory) -> list[str]:
    """Overrides of tiny_dapo that name a model, data and a folder."""
    folder = tmp_path_factory.mktemp("doctor")
    tokenizer.save_pretrained(folder / "model")
    tiny_tools.build_model.build_model(tokenizer, seed=0).save_pretrained(folder / "model")
    command = [sys.executable, str(ROOT / "data" / "tiny_tools" / "prepare.py"), "--out", str(folder / "data")]
    sizes = ["--sft=40", "--rl=64", "--test=8", "--ood=4"]
    subprocess.run([*command, *sizes], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return [
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files={folder}/data/rl_train.parquet",
        f"data.val_files={folder}/data/eval.parquet",
        f"trainer.default_local_dir={folder}/rl",
    ]


@pytest.fixture
def alone(monkeypatch):
    """No Ray cluster and only an empty lock, whatever runs on this machine."""
    from verl_ext.doctor import versions

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # Ray's sockets have no room in `tmp_path`
        monkeypatch.setenv("RAY_TMPDIR", short)
        monkeypatch.delenv("TMPDIR", raising=False)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
        monkeypatch.setattr(versions, "compare_installed", lambda pins: [])
        yield


@pytest.mark.timeout(600)  # 19 s on an idle machine, and four times as long on a busy one
def test_the_whole_examination_of_a_good_run(inputs, alone, capsys):
    with running_server(options=("--preload", "sympy")) as url:
        options = ["--config-name", "tiny_dapo", "--load-seconds", "0.5", f"retool.sandbox.urls=[{url}]", *inputs]
        status = main([*options, "--json"])
    report = json.loads(capsys.readouterr().out)
    told = [finding for finding in report["findings"] if finding["level"] != "OK"]
    assert [finding for finding in told if "too busy" not in finding["message"]] == []  # other tests load the machine
    assert status == 0 and report["counts"] == {"OK": len(report["findings"]) - len(told), "WARN": len(told), "FAIL": 0}
    topics = {
        "versions",
        "config",
        "names",
        "values",
        "batch",
        "time-outs",
        "machine",
        "memory",
        "checkpoints",
        "sandbox",
        "template",
        "data",
        "domains",
    }
    assert {finding["topic"] for finding in report["findings"]} == topics


def test_a_dead_sandbox_fails_and_is_not_loaded(inputs, alone, capsys):
    status = main(["--config-name", "tiny_dapo", "--quick", "retool.sandbox.urls=[http://127.0.0.1:9]", *inputs])
    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    assert lines[0].startswith("FAIL  sandbox     http://127.0.0.1:9 does not run code")
    assert lines[1].startswith("                  -> Start it with retool sandbox")
    assert lines[2].startswith("doctor: tiny_dapo, quick checks: ") and "0 WARN, 1 FAIL" in lines[2]


@pytest.mark.parametrize("options", [(), ("--quick",)])
def test_without_a_tokenizer_the_rest_is_said_to_be_unchecked(options, inputs, alone, monkeypatch, capsys, tmp_path):
    from verl_ext.doctor import sandbox

    monkeypatch.setattr(sandbox, "check_reachable", lambda run: [])
    monkeypatch.setattr(sandbox, "check_load", lambda run, seconds: [])
    (tmp_path / "empty").mkdir()
    status = main([*options, "--config-name", "tiny_dapo", *inputs, f"actor_rollout_ref.model.path={tmp_path}/empty"])
    printed = " ".join(capsys.readouterr().out.split())  # a long path is on a line by itself
    assert status == 1 and f"FAIL template there is no tokenizer at {tmp_path}/empty" in printed
    assert "lengths of texts are checked" in printed


def test_the_sandboxes_of_the_launchers_variable_are_looked_at(inputs, alone, monkeypatch, capsys):
    monkeypatch.setenv("SANDBOX_URL", "http://127.0.0.1:9,http://127.0.0.1:10")
    for override, ports in ((), (":9", ":10")), (("retool.sandbox.urls=['http://127.0.0.1:11']",), (":11",)):
        assert main(["--quick", "--config-name", "tiny_dapo", *inputs, *override]) == 1
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL  sandbox")]
        assert len(told) == len(ports) and all(port in line for port, line in zip(ports, told, strict=True)), told
    main(["--quick", "--config-name", "tiny_sft"])
    assert "sandbox" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_run"], "no_such_run cannot be composed"),
        (["tiny_dap"], "Did you mean tiny_dapo?"),
        (["tiny_dapo", "trainer.no_key=1"], "tiny_dapo cannot be composed: Could not override"),
        (["tiny_dapo", "trainer.no_key=1"], "-> Correct the YAML or the override."),
        (["tiny_dapo", "actor_rollout_ref.actor.optim.lrr=1"], "-> Did you mean actor_rollout_ref.actor.optim.lr?"),
        (["tiny_dapo", "~trainer.logge"], "-> Did you mean trainer.logger?"),
        (["tiny_dapo", "retool.sandbx.timeout_s=3"], "-> Did you mean retool.sandbox.timeout_s?"),
        (["tiny_dapo", "hardware=cpu_tny"], "-> Did you mean hardware/cpu_tiny?"),
    ],
)
def test_what_hydra_refuses_is_a_finding(arguments, message, capsys):
    assert main(["--quick", "--config-name", *arguments]) == 1
    assert message in capsys.readouterr().out


def test_a_misspelt_key_within_a_yaml_is_told(inputs, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("defaults: [tiny_dapo, _self_]\ntrainer: {savefreq: 3}\n")
    for name in ("tiny_dapo.yaml", "hardware", "shared"):
        (tmp_path / name).symlink_to(ROOT / "configs" / name)
    assert main(["--quick", "--config-dir", str(tmp_path), "--config-name", "mine", *inputs]) == 1
    printed = capsys.readouterr().out
    assert "verl does not know trainer.savefreq" in printed and "-> Did you mean trainer.save_freq?" in printed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_batch_size=0", "FAIL  values      data.train_batch_size is 0"),
        ("data.train_batch_size=many", "FAIL  values      data.train_batch_size is 'many'"),
        ("trainer=3", "FAIL  config      trainer is 3, but it is a section"),
    ],
)
def test_what_is_told_already_breaks_no_further_check(override, message, inputs, alone, monkeypatch, capsys):
    from verl_ext.doctor import sandbox

    monkeypatch.setattr(sandbox, "check_reachable", lambda run: [])
    assert main(["--quick", "--config-name", "tiny_dapo", *inputs, override]) == 1
    printed = capsys.readouterr().out
    assert message in printed and "a check raised" not in printed, printed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.adv_estimator=gropo", "FAIL  names       algorithm.adv_estimator is 'gropo'"),
        ("trainer.logger=[console,fil]", "FAIL  names       trainer.logger is 'fil'"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=retol", "Did you mean retool?"),
        ("actor_rollout_ref.rollout.temperature=0", "without exploration"),
        ("+reward.reward_kwargs.bonus=1", "reward.reward_kwargs.bonus is not a setting of verl_ext's reward manager"),
        ("+reward.reward_kwargs.verifiers={mine: nowhere.Verifier}", "The verifier for 'mine' is 'nowhere.Verifier'"),
        ("actor_rollout_ref.actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr is 1, expected in (0, 0.1]"),
        (
            "actor_rollout_ref.rollout.gpu_memory_utilization=.99",
            "gpu_memory_utilization is 0.99, expected in (0, 0.98]",
        ),
    ],
)
def test_what_users_mistype_stops_the_quick_part(override, message, inputs, alone, monkeypatch, capsys):
    from verl_ext.doctor import sandbox

    monkeypatch.setattr(sandbox, "check_reachable", lambda run: [])
    assert main(["--quick", "--config-name", "tiny_dapo", *inputs]) == 0
    assert main(["--quick", "--config-name", "tiny_dapo", *inputs, override]) == 1
    assert message in " ".join(capsys.readouterr().out.split()).replace("FAIL names ", "FAIL  names       "), message


def test_a_check_that_breaks_does_not_stop_a_run(inputs, alone, monkeypatch, capsys):
    from verl_ext.doctor import memory, sandbox

    monkeypatch.setattr(sandbox, "check_reachable", lambda run: [])
    monkeypatch.setattr(memory, "check_memory", lambda *_: 1 / 0)
    assert main(["--config-name", "tiny_dapo", "--quick", *inputs]) == 0
    assert "WARN  memory      a check raised ZeroDivisionError" in capsys.readouterr().out


def test_a_machine_that_cannot_be_looked_at_does_not_stop_a_run(inputs, alone, monkeypatch, capsys):
    from verl_ext.doctor import sandbox
    from verl_ext.runs import machine

    monkeypatch.setattr(sandbox, "check_reachable", lambda run: [])
    monkeypatch.setattr(machine, "query_gpus", lambda: 1 / 0)
    assert main(["--config-name", "tiny_dapo", "--quick", *inputs]) == 0
    printed = capsys.readouterr().out
    assert "WARN  machine     a check raised ZeroDivisionError" in printed and "1 WARN, 0 FAIL" in printed


def test_the_quick_part_imports_neither_torch_nor_verl(inputs):
    """The doctor runs before every start."""
    code = (
        "import sys; from verl_ext.doctor.__main__ import main; main(sys.argv[1:]);"
        "sys.exit(bool({'torch', 'verl', 'vllm', 'ray', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "--config-name", "tiny_dapo", "--quick", *inputs]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
