import json
from pathlib import Path

import pytest

from verl_ext.runs.folder import NoRun, dumps_of, find_run, sample_files, short_names, training_folder

RL_CONFIG = "actor_rollout_ref: {model: {path: m}}\ntrainer: {validation_data_dir: /made/elsewhere/checks}\n"
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
        ({"validation/5.jsonl": ""}, "rl"),
        ({"samples.jsonl": ""}, "evaluation"),
        ({"0.jsonl": "", "5.jsonl": ""}, "evaluation"),
        ({"stages.json": "[]"}, "quickstart"),
        ({"sft/metrics-1.jsonl": logged("train/loss")}, "quickstart"),
        ({"rl/hydra/config.yaml": RL_CONFIG}, "quickstart"),
        ({"eval/before/0.jsonl": ""}, "quickstart"),
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
        "samples.jsonl",
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


def test_dumps_are_found_below_a_run_that_was_copied_from_where_it_was_made(tmp_path):
    put(tmp_path / "hydra" / "config.yaml", RL_CONFIG)
    for name in ("10", "9", "notes"):
        put(tmp_path / "checks" / f"{name}.jsonl")
    assert [path.name for path in dumps_of(tmp_path, "validation_data_dir", "validation")] == ["9.jsonl", "10.jsonl"]
    assert dumps_of(tmp_path, "rollout_data_dir", "rollouts") == []


def test_names_are_as_long_as_they_must_be(tmp_path):
    assert short_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert short_names([tmp_path / "a" / "rl", tmp_path / "b" / "rl"]) == ["a/rl", "b/rl"]
    with pytest.raises(ValueError, match="more than once"):
        short_names([tmp_path / "a", tmp_path / "b" / ".." / "a"])


def test_dumps_in_the_folder_where_a_command_runs_belong_to_no_run(tmp_path, monkeypatch):
    put(tmp_path / "validation" / "5.jsonl")
    monkeypatch.chdir(tmp_path)
    assert dumps_of(tmp_path / "run", "validation_data_dir", "validation") == []


def test_validations_are_those_of_the_records_unless_some_are_light(tmp_path):
    """A light validation is in the records as a whole one is; its dumps have a separate folder."""
    dump = put(tmp_path / "validation" / "5.jsonl")
    recorded = put(tmp_path / "records" / "trajectories" / "val_000005.parquet")
    put(tmp_path / "records" / "trajectories" / "step_000005.parquet")
    assert sample_files(tmp_path) == [recorded]
    put(tmp_path / "hydra" / "config.yaml", RL_CONFIG + "retool: {light_validation: {enable: true}}\n")
    assert sample_files(tmp_path) == [dump]
    dump.unlink()
    assert sample_files(tmp_path) == [recorded]


def test_validations_are_the_dumps_if_the_recorder_has_removed_the_first(tmp_path):
    dumps = [put(tmp_path / "validation" / f"{step}.jsonl") for step in (0, 5)]
    recorded = [put(tmp_path / "records" / "trajectories" / f"val_{step:06d}.parquet") for step in (0, 5)]
    assert sample_files(tmp_path) == recorded
    recorded[0].unlink()
    assert sample_files(tmp_path) == dumps
    dumps[1].unlink()  # those of another start, perhaps
    assert sample_files(tmp_path) == recorded[1:]
