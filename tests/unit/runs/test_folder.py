import json
from pathlib import Path

import pytest

from verl_ext.runs.folder import NoRun, find_run, judged_files, short_names, training_folder

RL_CONFIG = "actor_rollout_ref: {model: {path: m}}\ntrainer: {default_local_dir: outputs/tiny_dapo}\n"
SFT_CONFIG = "model: {path: m}\ntrainer: {default_local_dir: outputs/tiny_sft}\n"


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def logged(*keys: str) -> str:
    return json.dumps({"step": 1, "data": dict.fromkeys(keys, 0.5)}) + "\n"


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"hydra/config.yaml": RL_CONFIG}, "rl"),
        ({"hydra/config.yaml": SFT_CONFIG}, "sft"),
        ({"metrics-1.jsonl": logged("critic/score/mean")}, "rl"),
        ({"metrics-1.jsonl": logged("train/loss")}, "sft"),
        ({"global_step_5/actor/model.pt": ""}, "rl"),
        ({"global_step_5/model.pt": ""}, "sft"),
        ({"records/trajectories/step_000001.parquet": ""}, "rl"),
        ({"records/trajectories/val_000005.parquet": ""}, "rl"),
        ({"settings.json": "{}", "records/trajectories/val_000000.parquet": ""}, "evaluation"),
        ({"settings.json": "{}", "records/waiting/000000.parquet": ""}, "evaluation"),
        ({"stages.json": "[]"}, "quickstart"),
        ({"sft/metrics-1.jsonl": logged("train/loss")}, "quickstart"),
        ({"rl/hydra/config.yaml": RL_CONFIG}, "quickstart"),
        ({"eval/before/records/trajectories/val_000000.parquet": ""}, "quickstart"),
    ],
)
def test_a_run_is_known_by_what_its_launcher_leaves(tmp_path, files, kind):
    for name, text in files.items():
        put(tmp_path / name, text)
    assert find_run(tmp_path).kind == kind


def test_a_folder_that_is_not_a_run_says_what_was_expected_and_which_runs_are_in_it(tmp_path):
    put(tmp_path / "outputs" / "notes.txt")
    put(tmp_path / "outputs" / "mine" / "metrics-1.jsonl", logged("train/loss"))
    with pytest.raises(NoRun) as raised:
        find_run(tmp_path / "outputs")
    message = str(raised.value)
    for part in (
        "it holds mine, notes.txt",
        "metrics-*.jsonl",
        "settings.json",
        "stages.json",
        f"{tmp_path}/outputs/mine",
    ):
        assert part in message
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoRun, match="it holds nothing"):
        find_run(tmp_path / "empty")
    with pytest.raises(NoRun, match="No run at .*nowhere. Expected the folder of a run"):
        find_run(tmp_path / "nowhere")


def test_a_command_for_one_kind_of_run_finds_it_in_the_quickstarts_folder(tmp_path):
    put(tmp_path / "sft" / "hydra" / "config.yaml", SFT_CONFIG)
    assert training_folder(tmp_path, "sft") == tmp_path / "sft"
    assert training_folder(tmp_path, "rl", "sft") == tmp_path / "sft"
    with pytest.raises(NoRun, match="No RL run at"):
        training_folder(tmp_path, "rl")
    put(tmp_path / "rl" / "hydra" / "config.yaml", RL_CONFIG)
    assert training_folder(tmp_path, "rl", "sft") == tmp_path / "rl"
    assert training_folder(tmp_path / "rl", "rl") == tmp_path / "rl"
    with pytest.raises(NoRun, match="No SFT run at .* of an RL run"):
        training_folder(tmp_path / "rl", "sft")


def test_names_are_as_long_as_they_must_be(tmp_path):
    assert short_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert short_names([tmp_path / "a" / "rl", tmp_path / "b" / "rl"]) == ["a/rl", "b/rl"]
    with pytest.raises(ValueError, match="more than once"):
        short_names([tmp_path / "a", tmp_path / "b" / ".." / "a"])


def recorded(run: Path, *names: str) -> list[Path]:
    return [put(run / "records" / "trajectories" / f"{name}.parquet") for name in names]


def test_judged_files_are_whole_validations_by_step_else_the_evaluations_of_checkpoints(tmp_path):
    recorded(tmp_path, "step_000005", "light_000003", "light_000005")
    assert judged_files(tmp_path) == []
    evaluations = tmp_path / "evaluation"
    evaluated = [
        *recorded(evaluations / "global_step_9", "val_000009"),
        *recorded(evaluations / "global_step_10", "val_000010"),
    ]
    recorded(evaluations / "mine", "val_000000")
    assert judged_files(tmp_path) == evaluated
    validated = recorded(tmp_path, "val_000005", "val_000010", "val_1000000")
    assert judged_files(tmp_path) == validated


def test_judged_files_of_the_quickstart_are_its_two_evaluations_else_those_of_its_run(tmp_path):
    (validated,) = recorded(tmp_path / "rl", "val_000005")
    assert judged_files(tmp_path) == [validated]
    after = recorded(tmp_path / "eval" / "after", "val_000000")
    assert judged_files(tmp_path) == after
    before = recorded(tmp_path / "eval" / "before", "val_000000")
    assert judged_files(tmp_path) == [*before, *after]
