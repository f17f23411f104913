"""`--from`: data and SFT of another quickstart."""

import json
from pathlib import Path

import pytest

from verl_ext.quickstart import pipeline
from verl_ext.quickstart.options import parse_options
from verl_ext.quickstart.pipeline import Journal, run_pipeline
from verl_ext.quickstart.source import NoSource, find_source


def test_from_takes_data_and_sft_and_runs_rl_with_its_own_settings(source, make_run, called, tmp_path, capsys):
    out = tmp_path / "second"
    out.mkdir()
    run = make_run(out=out, seed=3, rl=["b=2"], source=find_source(source))
    run_pipeline(run, list(pipeline.STAGES))
    assert called == ["rl", "merge_rl", "eval_before", "eval_after", "report"]
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} - {"stages.json"}
    assert files == {
        *("data/rl_train.parquet", "data/eval.parquet", "model/config.json", "sft/metrics-1.jsonl"),
        *("sft/merged/model.safetensors", "sft/merged/config.json", "sft/merged/tokenizer.json"),
    }
    printed = capsys.readouterr().out
    assert f"[from] {source}: data and SFT of seed 7, data ['--rl=64'], sft ['optim.lr=1']" in printed
    assert "sft/merged/model.safetensors (merged SFT model), SHA-256 " in printed
    assert f"[sft] taken from {source}" in printed
    entries = {entry["stage"]: entry for entry in json.loads((out / "stages.json").read_text())}
    assert (entries["sft"]["from"], entries["sft"]["wall_s"]) == (str(source), None)
    assert entries["sft"]["settings"]["seed"] == 7 and entries["rl"]["settings"]["seed"] == 3
    assert entries["rl"]["settings"]["rl"] == ["b=2"]

    called.clear()
    run_pipeline(run, list(pipeline.STAGES))
    assert called == ["report"]


def test_another_sft_in_the_folder_that_from_names_is_not_mixed_in(source, make_run, called, tmp_path):
    out = tmp_path / "second"
    out.mkdir()
    run_pipeline(make_run(out=out, source=find_source(source)), ["rl"])
    (source / "sft" / "merged" / "model.safetensors").write_text("trained again")
    with pytest.raises(SystemExit, match="holds a run with other settings"):
        run_pipeline(make_run(out=out, source=find_source(source)), ["rl"])


def test_an_sft_that_taught_tools_of_a_file_wants_them_again(source):
    find_source(source).check_tools(None)
    with pytest.raises(NoSource, match="its SFT has taught no tools of a file"):
        find_source(source).check_tools("0123")
    journal = Journal(source / "stages.json")
    settings = find_source(source).settings["sft"] | {"own": {"tools": "0123"}}
    journal.add(stage="sft", status="done", wall_s=1.0, settings=settings)
    find_source(source).check_tools("0123")
    for other in (None, "4567"):
        with pytest.raises(NoSource, match="has taught other tools. Give the --tools that it was made with"):
            find_source(source).check_tools(other)
    assert parse_options(["--from", str(source), "--tools", __file__]).tools


@pytest.mark.parametrize("gone", ["sft/merged/model.safetensors", "data/eval.parquet", "merge_sft"])
def test_from_names_what_its_folder_lacks(source, gone):
    if "/" in gone:
        (source / gone).unlink()
    else:
        journal = Journal(source / "stages.json")
        journal.add(stage=gone, status="broken", wall_s=1.0, settings={})
    with pytest.raises(NoSource, match=f"--from {source}: .*{gone}.*bash scripts/quickstart.sh --out"):
        find_source(source)


def test_each_from_gets_its_own_folder_and_the_same_command_gets_it_again(source, make_run, called):
    def start(rl):
        run = make_run(out=Path(), rl=rl, source=find_source(source))
        run.out = pipeline.next_folder(run, run.source.folder)
        run.out.mkdir(exist_ok=True)
        run_pipeline(run, ["rl"])
        return run.out.name

    assert [start(["a=1"]), start(["b=2"]), start(["a=1"])] == ["first-2", "first-3", "first-2"]


def test_from_goes_with_neither_data_nor_sft_nor_its_own_folder(source, capsys):
    for arguments, said in (
        (["--prepare=--rl=64"], "reuses data and SFT as they are"),
        (["--sft", "a=1"], "reuses data and SFT as they are"),
        (["--out", str(source)], "are the same folder"),
        (["--out", str(source.parent)], "contains the folder of --from"),
    ):
        with pytest.raises(SystemExit):
            parse_options(["--from", str(source), *arguments])
        assert said in capsys.readouterr().err
