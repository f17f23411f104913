import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.evaluation.rows import evaluation, row, write
from verl_ext.evaluation.problems import read_sets
from verl_ext.evaluation.samples import NoSamples
from verl_ext.records import store
from verl_ext.records.problem import problem_of
from verl_ext.runs.folder import NoRun
from verl_ext.runs.lock import lock_folder

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("filter_by_pass_rate")


def prompt(text):
    return [{"role": "system", "content": "Use code."}, {"role": "user", "content": text}]


def problem(text, **columns):
    """A row of a data file in verl's columns."""
    return {
        "data_source": "d",
        "prompt": prompt(text),
        "extra_info": {"index": "abcd".find(text), "id": text},
    } | columns


def name_of(data_row):
    return problem_of(data_row | {"raw_prompt": data_row["prompt"]})


def sample_row(text, acc, number=0, **columns):
    """A response to `problem(text)` in the records."""
    return row(text, number, acc, problem=name_of(problem(text)), **columns)


def test_samples_that_infrastructure_failed_count_neither_way(script, tmp_path):
    rows = [sample_row("a", 1, 0), sample_row("a", 0, 1), sample_row("a", 0, 2, end_reason="sandbox_failure")]
    rows += [sample_row("b", 0, 0, end_reason="verifier_unknown"), sample_row("c", 1, 0)]
    tallies, unknown = script.tally(script.past_samples(write(tmp_path, rows)), [problem(text) for text in "ab"])
    assert [(each.judged, each.correct, each.pass_rate) for each in tallies] == [(2, 1, 0.5), (0, 0, None)]
    assert unknown == 1


@pytest.mark.parametrize(
    "of_rows",
    [
        [{"reward_model": {"ground_truth": gold}} for gold in ("1", "2")],
        [{"reward_model": {"ground_truth": gold}} for gold in ({"a": 1, "b": [2]}, {"a": 1, "b": [3]})],
        [{"extra_info": {"id": name}} for name in (1, 2)],
        [{"extra_info": {"index": number}} for number in (0, 1)],
        [{"data_source": name} for name in ("one", "two")],
        [{"prompt": prompt("a")[1:]}, {"prompt": prompt("a")}],
    ],
)
def test_rows_with_one_last_message_have_the_samples_of_their_own_problem(script, tmp_path, of_rows):
    """Two samples of the first are right, the one of the second is wrong."""
    rows = [problem("a", **columns) for columns in of_rows]
    samples = [row("a", i, i < 2, problem=name_of(rows[i == 2])) for i in range(3)]
    tallies, unknown = script.tally(script.past_samples(write(tmp_path, samples)), rows)
    assert [(each.judged, each.correct) for each in tallies] == [(2, 2), (1, 0)] and not unknown


def test_a_share_of_the_tests_counts_as_it_does_in_a_run_but_solves_nothing(script, tmp_path):
    """Of two programs, one passes 9 of 10 tests and one 7: the rate is .8, and the problem was never solved."""
    file = write(tmp_path, [sample_row("a", 0.9, 0), sample_row("a", 0.7, 1)])
    (found,), _ = script.tally(script.past_samples(file), [problem("a")])
    assert (found.pass_rate, found.correct) == (pytest.approx(0.8), 0)
    assert not script.is_kept(found, max_rate=0.625, must_be_solved=False)
    assert not script.is_kept(found, max_rate=1.0, must_be_solved=True)
    nearly = [script.Tally(3, 0, 0.1 + 0.2), script.Tally(3, 0, 0.3)]  # 0.30000000000000004 and 0.3
    assert script.histogram(nearly, [True, True]).splitlines()[1].split()[:3] == ["0.100", "2", "2"]


def test_rows_that_a_data_set_repeats_share_their_samples(script, tmp_path):
    rows = [problem("a", extra_info={"id": "a", "index": number}) for number in range(100)]
    samples = script.past_samples(write(tmp_path, [sample_row("a", 1, i) for i in range(8)]))
    tallies, _ = script.tally(samples, rows)
    assert [(each.judged, each.correct) for each in tallies] == [(8, 8)] * 100


def test_the_samples_of_an_evaluation_are_found_without_the_instructions_around_a_problem(script, tmp_path):
    from verl_ext.datasets.text import PROMPTS

    asked = problem("a", prompt=[{"role": "user", "content": PROMPTS["code"].format(problem="1+1?")}])
    asked["reward_model"] = {"ground_truth": "2"}
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(asked) + "\n")
    (evaluated,) = read_sets([str(file)], protocol="code")
    assert evaluated["problem"] != name_of(asked)
    folder = evaluation(tmp_path / "out", [row("a", i, 1, problem=evaluated["problem"]) for i in range(2)])
    tallies, unknown = script.tally(script.past_samples(folder), [asked])
    assert (tallies[0].judged, unknown) == (2, 0)


def test_all_records_of_a_run_count_and_of_a_run_without_records_its_evaluations(script, tmp_path, capsys):
    run = tmp_path / "rl"
    raised = {"uid": "a", "session": 3, "end_reason": "raised"}
    store.write(store.path_of(run, "trajectories", 1), "trajectories", [sample_row("a", 1), raised])
    validated = write(run, [sample_row("b", 0), sample_row("b", 0, 1)], step=1)
    assert len(script.past_samples(run)) == len(script.past_samples(tmp_path)) == 3, "the quickstart has the run in rl/"
    assert capsys.readouterr().out.splitlines() == [f"3 samples of {validated.parent} (2 files)"] * 2
    assert len(script.past_samples(validated)) == 2
    sft = tmp_path / "other" / "run"
    for step in (10, 20):
        evaluation(sft / "evaluation" / f"global_step_{step}", [sample_row("a", step > 10)])
    (sft / "hydra").mkdir()
    (sft / "hydra" / "config.yaml").write_text("model: {path: m}\n")
    assert [sample.acc for sample in script.past_samples(sft)] == [0.0, 1.0]


def test_what_is_no_source_is_named(script, tmp_path):
    with pytest.raises(NoSamples, match="there is no such file or folder"):
        script.past_samples(tmp_path / "nowhere")
    with pytest.raises(NoRun, match="it holds nothing"):
        script.past_samples(tmp_path)
    (tmp_path / "metrics-1.jsonl").write_text('{"step": 1, "data": {"train/acc": 1}}\n')
    with pytest.raises(NoSamples, match="Looked for records/"):
        script.past_samples(tmp_path)


@pytest.mark.parametrize(
    ("own", "teacher", "easy_out", "rare"),
    [
        (0, None, True, False),
        (1, None, True, True),
        (2, None, True, True),  # 2 of 8 is 25%
        (3, None, True, False),
        (5, None, True, False),  # 5 of 8 is 62.5%: not above
        (6, None, False, False),
        (8, None, False, False),
        (0, 0, True, False),
        (0, 1, True, True),
        (6, 8, False, False),
    ],
)
def test_the_bands_of_eight_samples(script, own, teacher, easy_out, rare):
    teacher, own = (None if correct is None else script.Tally(8, correct, correct) for correct in (teacher, own))
    assert script.is_kept(own, max_rate=0.625, must_be_solved=False, teacher=teacher) is easy_out
    assert script.is_kept(own, max_rate=0.25, must_be_solved=True, teacher=teacher) is rare


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    """Four problems in verl's columns."""
    import pandas as pd

    rows = [problem(text) for text in "abcd"]
    path = tmp_path / "data.parquet"
    pd.DataFrame(rows).to_parquet(path)
    return path


@pytest.fixture
def command(monkeypatch, capsys, data, tmp_path):
    """Run the script on `data`; return what it printed and the ids it kept."""
    import pandas as pd

    def run(*args):
        out = tmp_path / "out.parquet"
        out.unlink(missing_ok=True)
        script = str(REPO / "scripts" / "filter_by_pass_rate.py")
        monkeypatch.setattr(sys, "argv", [script, "--data", str(data), "--out", str(out), *map(str, args)])
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out, [info["id"] for info in pd.read_parquet(out)["extra_info"]]

    return run


def solved(text, correct, of=8):
    return [sample_row(text, int(i < correct), i) for i in range(of)]


def test_the_file_keeps_its_rows_and_columns_less_the_easy_ones_and_gets_the_pass_rates(command, data, tmp_path):
    import pandas as pd

    file = write(tmp_path / "past", solved("a", 8) + solved("b", 5) + solved("c", 0) + solved("d", 1))
    printed, kept = command("--runs", file)
    assert kept == ["b", "c", "d"]
    assert "4 problems, 0 without a judged sample, 3 kept" in printed
    before, after = pd.read_parquet(data), pd.read_parquet(tmp_path / "out.parquet").reset_index(drop=True)
    for i, j in ((1, 0), (3, 2)):
        assert str(before.iloc[i].to_dict()) == str(after.drop(columns="pass_rate").iloc[j].to_dict())
    assert after["pass_rate"].tolist() == [0.625, 0.0, 0.125]
    rates = [json.loads(line) for line in (tmp_path / "out.pass_rates.jsonl").read_text().splitlines()]
    assert rates[1] == {"row": 1, "id": "b", "samples": 8, "correct": 5, "pass_rate": 0.625, "kept": True}
    assert [rate["kept"] for rate in rates] == [False, True, True, True]

    assert command("--runs", file, "--band", "rarely-solved")[1] == ["d"]
    assert command("--runs", file, "--max-rate", "0.1")[1] == ["c"]
    teacher = write(tmp_path / "teacher", solved("c", 2) + solved("b", 0))
    assert command("--runs", file, "--band", "rarely-solved", "--solved-by", teacher)[1] == ["c", "d"]


def test_integers_beside_a_null_stay_integers(command, data, tmp_path):
    """pandas makes floats of them, also within a struct."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pq.read_table(data).to_pylist()
    rows = [row | {"level": None if i else 3, "extra_info": row["extra_info"]} for i, row in enumerate(rows)]
    rows[3]["extra_info"] = {"index": None, "id": "d"}
    pq.write_table(pa.Table.from_pylist(rows), data)
    file = write(tmp_path / "past", [row for text in "abcd" for row in solved(text, 0)])
    command("--runs", file)
    kept = pq.read_table(tmp_path / "out.parquet")
    assert kept.drop_columns("pass_rate").to_pylist() == rows
    assert [kept.schema.field(name).type for name in ("level", "pass_rate")] == [pa.int64(), pa.float64()]
    (tmp_path / "out.parquet").replace(data)  # filtered again, the column is there once
    command("--runs", file)
    assert pq.read_table(tmp_path / "out.parquet").column_names.count("pass_rate") == 1


def test_several_files_add_up(command, tmp_path):
    files = [write(tmp_path / str(i), [sample_row(t, i % 2, i) for t in "abcd"]) for i in range(2)]
    assert "    0.500         4        4" in command("--runs", *files)[0]


def test_problems_without_a_judged_sample_need_a_decision(command, tmp_path):
    import pandas as pd

    file = write(tmp_path / "past", solved("a", 8) + solved("b", 5) + solved("c", 0))
    with pytest.raises(SystemExit, match=r"1 of 4 problems have no judged sample \(the first is row 3\)"):
        command("--runs", file)
    assert command("--runs", file, "--unjudged", "keep")[1] == ["b", "c", "d"]
    kept = pd.read_parquet(tmp_path / "out.parquet")
    assert kept["pass_rate"].tolist()[:2] == [0.625, 0.0] and pd.isna(kept["pass_rate"].iloc[2])
    assert command("--runs", file, "--unjudged", "drop")[1] == ["b", "c"]


def test_nothing_left_is_an_error(command, tmp_path):
    file = write(tmp_path / "past", [row for text in "abcd" for row in solved(text, 8)])
    with pytest.raises(SystemExit, match="No problem is left"):
        command("--runs", file)
    assert not (tmp_path / "out.parquet").exists()


LAUNCHER = """
echo start >> "$FAKE_LOG"
exec "$PYTHON" - "$@" <<'END'
import json, os, sys
from pathlib import Path
import pandas as pd
from verl_ext.records import store
options = dict(arg.split("=", 1) for arg in sys.argv[1:])
assert os.environ["SANDBOX_URL"] == "http://127.0.0.1:9" and options["trainer.val_only"] == "True"
assert float(options["actor_rollout_ref.rollout.val_kwargs.temperature"]) == 1.0
assert options["retool.recorder.enable"] == "true"
files, rows = json.loads(options["data.val_files"].replace("'", '"')), []
for sample, file in enumerate(files):
    for messages in pd.read_parquet(file)["prompt"]:
        text = messages[-1]["content"]
        if os.environ["FAKE_BREAK"] == text:
            sys.exit(3)
        row = json.loads(os.environ["FAKE_ROWS"])[text] | {"uid": f"{text}-{sample}"}
        rows.append(row | {"acc": float(text in "ab" or sample == 0)})
path = store.path_of(Path(os.environ["OUTPUT_DIR"]), "trajectories", 0, validate=True)
store.write(path, "trajectories", rows)
END
"""


@pytest.mark.nightly
def test_samples_are_generated_in_chunks_and_a_broken_run_goes_on(data, tmp_path):
    import pandas as pd

    launcher, log, out = tmp_path / "run.sh", tmp_path / "starts", tmp_path / "out.parquet"
    launcher.write_text(LAUNCHER)
    script = str(REPO / "scripts" / "filter_by_pass_rate.py")
    command = [sys.executable, script, "--data", data, "--out", out, "--samples", "4", "--chunk", "2"]
    variables = {
        "FAKE_LOG": str(log),
        "FAKE_ROWS": json.dumps({text: sample_row(text, 0) for text in "abcd"}),
        "SANDBOX_URL": "http://127.0.0.1:9",
    }

    def run(override="trainer.nnodes=1", breaks_at=""):
        """Run the script in a separate process, because the script adopts orphaned processes."""
        return subprocess.run(
            [*map(str, command), "--generate", str(launcher), override],
            env=os.environ | variables | {"FAKE_BREAK": breaks_at},
            capture_output=True,
            text=True,
        )

    broken = run(breaks_at="d")  # in the second chunk
    assert broken.returncode == 1 and "filter_by_pass_rate: " in broken.stderr
    assert len(log.read_text().split()) == 2 and not out.exists()

    done = run()
    assert done.returncode == 0, done.stderr
    assert [info["id"] for info in pd.read_parquet(out)["extra_info"]] == ["c", "d"]
    assert "0.250         2        2" in done.stdout and "1.000         2        0" in done.stdout
    assert len(log.read_text().split()) == 3 and "chunk_0000: done already" in done.stdout
    assert "holds samples of other settings" in run("trainer.nnodes=2").stderr
    with lock_folder(out.with_suffix(".samples")):  # a run whose script was killed
        assert "Another run writes into" in run().stderr


def test_the_command_takes_a_runs_folder_and_leaves_failed_samples_out(command, tmp_path):
    rows = solved("a", 8) + solved("b", 4) + solved("c", 0) + solved("d", 2)
    failed = [sample_row("b", 0, number, end_reason="sandbox_failure") for number in range(8, 12)]
    write(tmp_path / "run", rows + failed)
    printed, kept = command("--runs", tmp_path / "run")
    assert kept == ["b", "c", "d"] and "    0.500         1        1" in printed
    assert "4 samples are left out, because sandbox, server or verifier failed" in printed


def test_the_command_refuses_a_run_of_other_problems(command, data, tmp_path):
    import pandas as pd

    problems = pd.read_parquet(data)
    problems.assign(prompt=[prompt(f"Find {number}.") for number in range(4)]).to_parquet(data)
    write(tmp_path / "run", [sample_row("Find 9.", 1)])
    with pytest.raises(SystemExit, match="filter_by_pass_rate: None of the 1 samples in .*run belongs to a problem of"):
        command("--runs", tmp_path / "run", "--unjudged", "keep")
    with pytest.raises(SystemExit, match="filter_by_pass_rate: No samples at .*nowhere"):
        command("--runs", tmp_path / "nowhere")
