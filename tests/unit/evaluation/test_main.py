"""The command line of `retool evaluate`, and `scripts/merge_and_eval.sh`; no model runs here."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.evaluation.rows import evaluation, row
from verl_ext.evaluation.__main__ import main, parse_args
from verl_ext.evaluation.settings import ConfigError, load_config, model_fingerprint, sample_settings

REPO = Path(__file__).resolve().parents[3]


def test_arguments_and_overrides_may_stand_in_any_order():
    args = parse_args(
        ["retool.traceback=full", "--model", "m", "--data", "aime_2025", "--data", "x.parquet", "~trainer.logger"]
        + ["--out", "o", "data.max_prompt_length=9"]
    )
    assert args.overrides == ["retool.traceback=full", "~trainer.logger", "data.max_prompt_length=9"]
    assert (args.data, args.model, args.n, args.seed) == (["aime_2025", "x.parquet"], Path("m"), None, 0)
    assert parse_args(["--model", "m", "--out", "o"]).data == ["aime_2024", "aime_2025"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one of the arguments --model --server --chat --checkpoint --samples is required"),
        (["--model", "m", "--server", "http://x/v1", "--out", "o"], "not allowed with argument"),
        (["--model", "m"], "give --out, the folder"),
        (["--model", "m", "--out", "o", "aime_2025"], "'aime_2025' is not an override of the form KEY=VALUE"),
        (["--samples", "s", "retool.protocol=code"], "nothing is generated with --samples"),
        (["--server", "localhost:8000", "--out", "o"], "--server is 'localhost:8000': expected a URL"),
        (["--server", "http://x/v1", "--out", "o", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY: there is no such"),
        (["--model", "m", "--out", "o", "--n", "0"], "--n is 0: expected at least 1"),
    ],
)
def test_wrong_usage_is_refused(argv, message, capsys):
    with pytest.raises(SystemExit) as error:
        parse_args(argv)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_samples_that_are_there_are_compared_without_a_model(tmp_path, capsys):
    before = evaluation(tmp_path / "before", [row(name, i, 0) for name in "abc" for i in (0, 1)])
    after = evaluation(tmp_path / "after", [row(name, i, 1) for name in "abc" for i in (0, 1)])
    main(["--samples", str(after), "--compare", str(before), "--draws", "100", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "1.000 [0.292, 1.000]" in printed and "+1.000 [-0.415, +1.000]" in printed  # 0.025^(1/3)
    assert (tmp_path / "out" / "result.md").read_text() in printed
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["comparison"]["difference"]["mine"]["test"]["better"] == 3
    assert not (after / "result.json").exists()
    main(["--samples", str(after), "--draws", "10"])
    assert not (after / "result.json").exists(), "without --out nothing is written"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--samples", "{tmp}"], "No samples at"),
        (["--samples", "{tmp}/m/config.json"], "No samples at .*config.json.*retool records import. makes"),
        (["--model", "{tmp}", "--out", "{tmp}/o"], "is not a Hugging Face folder: it has no config.json"),
        (["--model", "Qwen/Qwen3-4B", "--out", "{tmp}/o"], "Qwen3-4B is not a folder.*on the hub.*`hf download"),
        (["--model", "{tmp}/m", "--out", "{tmp}/o"], "/m is not in a run's folder.* Give --protocol code .*hermes"),
        (["--checkpoint", "{tmp}"], "has no complete checkpoint"),
        (["--model", "{tmp}/m", "--out", "{tmp}/o", "--compare", "{tmp}/before"], "No samples at .*/before"),
        (["--model", "{tmp}/m", "--out", "{tmp}/o", "--config", "qwen2"], "qwen2.yaml does not exist.*qwen2-32b_dapo"),
        (["--model", "{tmp}/m", "--out", "{tmp}/o", "--protocol=code", "--data", "x.parquet"], "x.parquet is neither"),
        (["--model", "{tmp}/m", "--out", "{tmp}/o", "retool.protocl=code"], "Could not override 'retool.protocl'"),
        (["--model", "{tmp}/m", "--out", "{tmp}/o", "--config", "tiny_sft"], "belongs to no RL run with tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_ends_with_one_line(tmp_path, argv, message, capsys):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=f"evaluate: .*{message}"):
        main([each.format(tmp=tmp_path) for each in argv])
    assert not (tmp_path / "o").exists()


def test_a_config_is_composed_by_name_and_from_a_runs_folder(tmp_path):
    from omegaconf import OmegaConf

    named = load_config("tiny_dapo", ["retool.protocol=hermes"])
    assert (named.retool.protocol, named.actor_rollout_ref.rollout.response_length) == ("hermes", 128)
    saved = tmp_path / "hydra" / "config.yaml"
    saved.parent.mkdir()
    saved.write_text(OmegaConf.to_yaml(named))
    again = load_config(str(saved), ["data.max_response_length=64"])
    assert (again.retool.protocol, again.actor_rollout_ref.rollout.response_length) == ("hermes", 64)
    assert load_config(str(saved), ["+hardware=cpu_tiny"]).data.train_batch_size == 4
    with pytest.raises(ConfigError, match="protocl"):
        load_config(str(saved), ["retool.protocl=code"])


def test_settings_are_what_a_sample_depends_on_and_not_where_the_sandbox_is():
    from omegaconf import OmegaConf

    rows = [{"uid": "a:0", "problem": "x"}, {"uid": "b:0", "problem": "y"}, {"uid": "b:1", "problem": "z"}]
    composed = load_config("qwen2-32b_dapo", [])

    def settings(key: str = "", value: object = None, **changes) -> dict:
        config = composed.copy()
        if key:
            OmegaConf.update(config, key, value, force_add=True)
        given = {"seed": 0, "model": {"sha256": "1"}, "interface": "fake", "chat_template": "{{ messages }}"}
        return sample_settings(config, rows, **given | changes)

    now = settings()
    assert json.loads(json.dumps(now)) == now
    assert {name: each["problems"] for name, each in now["data"].items()} == {"a": 1, "b": 2}
    assert (now["n"], now["temperature"], now["top_p"], now["top_k"], now["seed"]) == (30, 1.0, 0.6, -1, 0)
    assert (now["max_prompt_length"], now["max_response_length"]) == (2048, 16384)
    assert now["retool"]["max_tool_calls"] == 8 and now["retool"]["sandbox"]["timeout_s"] == 30
    same = {
        "retool.sandbox.urls": ["http://10.0.0.1:8080"],
        "retool.sandbox.max_concurrency": 1,
        "trainer.nnodes": 1,
        "retool.early_stop.enable": True,
        "retool.checkpoints.keep_last": 1,
        "retool.fleet.health.every_s": 1,
    }
    for key, value in same.items():
        assert settings(key, value) == now, key
    table = {"math": {"weight": 1, "n": 4, "environment": "notebook"}}
    weighed = {"math": {"weight": 2, "train": "x", "environment": "notebook"}}
    assert settings("retool.domains", table) == settings("retool.domains", weighed) != now
    assert settings("retool.curriculum.enable", True) == now
    agent = {"run": "agent.py:solve", "timeout_s": 60}
    assert settings("retool.agent", agent) == settings("retool.agent", agent | {"max_rows": 1, "host": "b"}) != now
    assert "agent" not in now["retool"], "an evaluation from before there were agents continues"
    other = {
        "retool.sandbox.timeout_s": 1,
        "retool.traceback": "last_line",
        "data.apply_chat_template_kwargs.enable_thinking": False,
        "data.max_response_length": 64,
        "actor_rollout_ref.rollout.val_kwargs.top_k": 5,
        "reward.reward_kwargs.verifiers": {"mine": "x.Y"},
        "retool.validation.retries": 0,
        "actor_rollout_ref.rollout.dtype": "float16",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs": 1,
        "actor_rollout_ref.rollout.multi_turn.function_tool_path": "tools.py",
    }
    for key, value in other.items():
        assert settings(key, value) != now, key
    assert settings(seeded=False) == now | {"seed": None}
    assert settings(seed=1) != now != settings(model={"sha256": "2"})
    assert settings(chat_template="{{ messages[0] }}") != now


def test_a_models_fingerprint_changes_with_any_of_its_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(5 * 2**20))
    first = model_fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("notes")
    assert model_fingerprint(tmp_path) == first
    weights.write_bytes(bytes(5 * 2**20 - 1) + b"\1")
    assert model_fingerprint(tmp_path) != first
    weights.write_bytes(bytes(5 * 2**20))
    assert model_fingerprint(tmp_path) == first
    (tmp_path / "config.json").write_text("{ }")
    assert model_fingerprint(tmp_path) != first


def script(*args: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(REPO / "scripts" / "merge_and_eval.sh"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, env=os.environ | environment, cwd="/")


def test_merge_and_eval_hands_its_arguments_on(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    done = script("run dir", "--n", "4", "retool.protocol=hermes", PYTHON=str(python), PYTHONPATH="/other")
    command = ["-m", "verl_ext.evaluation", "--checkpoint", "run dir"]
    assert done.stdout.splitlines() == ["/", f"{REPO}:/other", *command, "--n", "4", "retool.protocol=hermes"]


def test_merge_and_eval_explains_itself():
    assert (done := script("--help")).returncode == 0 and "CKPT_DIR" in done.stdout and "#!" not in done.stdout
    assert script().returncode == 2
