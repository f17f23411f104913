import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_ext.checkpoints.folder import vouch
from verl_ext.evaluation.checkpoint import CheckpointError, find_checkpoint, merge, settings_of


def make_step(run: Path, step: int, *, ranks: int = 2, actor: bool = False, without: tuple[int, ...] = ()) -> Path:
    folder = run / f"global_step_{step}" / ("actor" if actor else "")
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "config.json").write_text("{}")
    for rank in set(range(ranks)) - set(without):
        (folder / f"model_world_size_{ranks}_rank_{rank}.pt").touch()
    return folder


def note(run: Path, step: int) -> None:
    (run / "latest_checkpointed_iteration.txt").write_text(str(step))


@pytest.mark.parametrize("actor", [False, True], ids=["sft", "rl"])
def test_a_checkpoint_is_found_by_its_run_its_step_and_its_shards(tmp_path, actor):
    for step in (3, 30):
        shards = make_step(tmp_path, step, actor=actor)
    note(tmp_path, 30)
    for path in {tmp_path, tmp_path / "global_step_30", shards}:
        found = find_checkpoint(path)
        assert (found.run, found.step, found.shards) == (tmp_path, 30, shards)
    assert find_checkpoint(tmp_path / "global_step_3").step == 3
    assert found.merged == tmp_path / "merged_step_30"


def test_of_the_quickstarts_folder_the_rl_run_is_taken_or_else_the_sft_run(tmp_path):
    make_step(tmp_path / "sft", 500)
    note(tmp_path / "sft", 500)
    assert find_checkpoint(tmp_path).run == tmp_path / "sft"
    make_step(tmp_path / "rl", 30, actor=True)
    note(tmp_path / "rl", 30)
    found = find_checkpoint(tmp_path)
    assert (found.run, found.step, found.merged) == (tmp_path / "rl", 30, tmp_path / "rl" / "merged_step_30")


def test_of_a_run_the_newest_whole_step_is_taken(tmp_path):
    for step in (10, 20):
        make_step(tmp_path, step)
    make_step(tmp_path, 30, without=(1,))
    make_step(tmp_path, 40)  # killed before it was noted
    note(tmp_path, 30)
    assert find_checkpoint(tmp_path).step == 20


@pytest.mark.parametrize(
    ("steps", "noted", "path", "message"),
    [
        ({}, None, "nowhere", "is not a folder"),
        ({}, None, "", "no complete checkpoint: steps none, noted as saved none"),
        ({5: {}}, None, "", r"steps \[5\], noted as saved none"),
        ({5: {"without": (0,)}}, 5, "", r"steps \[5\], noted as saved 5"),
        ({5: {"without": (0, 2), "ranks": 4}}, 5, "global_step_5", r"lacks the shards of ranks \[0, 2\] of 4"),
        ({5: {"ranks": 0}}, 5, "global_step_5", "has no model_world_size"),
        ({5: {}, 6: {}}, 5, "global_step_6", "noted step 5 as its last complete one"),
    ],
)
def test_what_is_not_whole_is_refused_with_what_is_missing(tmp_path, steps, noted, path, message):
    for step, settings in steps.items():
        make_step(tmp_path, step, **settings)
    if noted:
        note(tmp_path, noted)
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(tmp_path / path)


def test_what_verl_ext_saved_counts_by_its_own_list(tmp_path):
    for step in (10, 20, 30):
        shards = make_step(tmp_path, step, actor=True)
        (shards / "optim_world_size_2_rank_0.pt").write_bytes(b"Adam")
        (shards / "optim_world_size_2_rank_1.pt").write_bytes(b"Adam")
        (shards / "model_world_size_2_rank_0.pt").write_bytes(b"weights")
        vouch(shards.parent)
    note(tmp_path, 10)  # the run was set back
    assert find_checkpoint(tmp_path).step == find_checkpoint(tmp_path / "global_step_30").step == 30
    (shards / "optim_world_size_2_rank_0.pt").unlink()
    assert find_checkpoint(tmp_path).step == 30, "an evaluation needs no optimizer"
    (shards / "model_world_size_2_rank_0.pt").write_bytes(b"wei")
    assert find_checkpoint(tmp_path).step == 20
    with pytest.raises(CheckpointError, match="rank_0.pt has 3 of 7 bytes"):
        find_checkpoint(shards)


def test_an_empty_note_is_none(tmp_path):
    make_step(tmp_path, 5)
    (tmp_path / "latest_checkpointed_iteration.txt").touch()
    with pytest.raises(CheckpointError, match=r"steps \[5\], noted as saved none"):
        find_checkpoint(tmp_path)


def test_shards_of_two_world_sizes_are_refused(tmp_path):
    folder = make_step(tmp_path, 5)
    (folder / "model_world_size_1_rank_0.pt").touch()
    with pytest.raises(CheckpointError, match="shards of 1 and 2 ranks"):
        find_checkpoint(folder)


def test_a_step_that_was_copied_elsewhere_counts_by_its_shards(tmp_path):
    assert find_checkpoint(make_step(tmp_path, 7, actor=True)).step == 7


@pytest.fixture
def merger(tmp_path, monkeypatch):
    """A Python that stands in for verl's model merger: writes its arguments, exits with the status in `status`."""
    python, status = tmp_path / "python", tmp_path / "status"
    status.write_text("0")
    python.write_text(
        f'#!/bin/sh\necho "$VERL_USE_EXTERNAL_MODULES $@"\neval "target=\\${{$#}}"\nmkdir -p "$target"\n'
        f'echo "$@" >> {tmp_path}/calls\nexit $(cat {status})\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return lambda: (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []


def test_a_checkpoint_is_merged_once_and_again_when_its_shards_are_newer(tmp_path, merger, capsys):
    shards = make_step(tmp_path / "run", 5)
    checkpoint = find_checkpoint(shards)
    (tmp_path / "run" / "merged_step_5.part").mkdir()  # of an interrupted merge
    assert merge(checkpoint) == tmp_path / "run" / "merged_step_5" and checkpoint.merged.is_dir()
    assert merger() == [
        f"-m verl.model_merger merge --backend fsdp --local_dir {shards} --target_dir {checkpoint.merged}.part"
    ]
    assert Path(f"{checkpoint.merged}.log").read_text().startswith("verl_ext -m")
    assert merge(checkpoint) == checkpoint.merged and len(merger()) == 1
    assert "merged already" in capsys.readouterr().out
    later = checkpoint.merged.stat().st_mtime + 10
    os.utime(shards / "model_world_size_2_rank_1.pt", (later, later))
    merge(checkpoint)
    assert len(merger()) == 2


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [
        ("engine: {mixed_precision: {param_dtype: fp32}}", True),
        ("engine: {mixed_precision: {param_dtype: float32}}", True),
        ("engine: {mixed_precision: {param_dtype: bf16}}", False),
        ("engine: {mixed_precision: null}", False),
        ("actor_rollout_ref: {actor: {fsdp_config: {mixed_precision: {param_dtype: fp32}}}}", True),
        ("actor_rollout_ref: {actor: {fsdp_config: {}}}", False),
        (None, False),
    ],
)
def test_a_merge_of_an_fp32_run_says_that_the_model_is_bf16(settings, is_told, tmp_path, merger, capsys):
    shards = make_step(tmp_path / "run", 5)
    if settings:
        (tmp_path / "run" / "hydra").mkdir()
        (tmp_path / "run" / "hydra" / "config.yaml").write_text(settings + "\n")
    merge(find_checkpoint(shards))
    said = capsys.readouterr().out
    assert ("is bf16, though its run computed in fp32: verl's merger has no option" in said) == is_told
    assert (f"{shards} keeps the weights in fp32" in said) == is_told


def test_verls_merger_makes_bf16_whatever_the_shards_are():
    """Else the note could go."""
    from verl_ext.settings import VERL

    assert (VERL / "model_merger" / "fsdp_model_merger.py").read_text().count(".bfloat16()") == 2


def test_two_merges_of_a_checkpoint_wait_for_each_other(tmp_path, merger):
    checkpoint = find_checkpoint(make_step(tmp_path / "run", 5))
    python = Path(sys.executable)
    python.write_text(python.read_text().replace("exit $(", 'sleep .3\ntouch "$target/shard"\nexit $('))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(merge, [checkpoint] * 2)) == [checkpoint.merged] * 2
    assert len(merger()) == 1 and (checkpoint.merged / "shard").exists()


def test_a_merge_that_fails_leaves_no_model(tmp_path, merger):
    checkpoint = find_checkpoint(make_step(tmp_path / "run", 5))
    (tmp_path / "status").write_text("3")
    with pytest.raises(CheckpointError, match="failed with status 3.*merged_step_5.log"):
        merge(checkpoint)
    assert not checkpoint.merged.exists()


def test_an_rl_run_is_evaluated_with_its_own_settings_and_sft_with_those_of_its_rl_run(tmp_path):
    with pytest.raises(CheckpointError, match="config.yaml does not exist.*--config"):
        settings_of(tmp_path)
    config = tmp_path / "hydra" / "config.yaml"
    config.parent.mkdir()
    config.write_text("actor_rollout_ref: {}\ntrainer: {experiment_name: mine}\n")
    assert settings_of(tmp_path) == (str(config), [])
    config.write_text("data: {retool: {protocol: hermes}}\ntrainer: {experiment_name: qwen2-32b_sft}\n")
    assert settings_of(tmp_path) == ("qwen2-32b_dapo", ["retool.protocol=hermes"])
    config.write_text("data: {retool: {protocol: text}}\ntrainer: {experiment_name: tiny_sft}\n")
    assert settings_of(tmp_path) == ("tiny_dapo", ["+tool=none"]), "and so without a tool"
    config.write_text("data: {}\ntrainer: {experiment_name: mine}\n")
    with pytest.raises(CheckpointError, match="'mine', but there is no configs/mine_dapo.yaml"):
        settings_of(tmp_path)
