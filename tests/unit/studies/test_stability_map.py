"""The command of the stability map: its runs, what of a model's code it executes, and that it resumes where it was."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def script(tiny_tools):
    from scripts.studies import stability_map

    return stability_map


def test_there_are_270_runs(script):
    cells = script.cells()
    assert len(cells) == len({cell.name for cell in cells}) == 270
    assert len({cell.objective for cell in cells}) == 15
    assert {cell.staleness for cell in cells if cell.bf16} == {0, 4}
    assert {cell.staleness for cell in cells if not cell.bf16} == {0, 1, 4, 16}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(12*30+4)", "364"),
        ("x=7", "(no output)"),
        ("prin(7)", "NameError: name 'prin' is not defined. Did you mean: 'print'?"),
        ("print(7", "SyntaxError: '(' was never closed"),
        ("print(7//0)", "ZeroDivisionError: integer division or modulo by zero"),
    ],
)
def test_what_the_task_has_is_run(script, code, said):
    assert script.interpret(code) == said


@pytest.mark.parametrize(
    "code",
    [
        *("import os", "open('x','w')", "print(9**9**9)", "while 1:pass", "[0]*9**9", "print('a'*999999999)"),
        *("exit()", "print.__self__", "x=lambda:0", "print(1"[:6] + "9" * 80 + ")", "print(10000000*2)", "f(1)"),
    ],
)
def test_anything_else_is_not_run(script, monkeypatch, code):
    monkeypatch.setattr(script, "interpreter_output", lambda code: pytest.fail(f"{code} was run"))
    assert script.interpret(code) in ("NameError: name is not defined", "MemoryError")


def digests_of(folder):
    """Return the digests of a quickstart `data/sft`: two words for what it holds."""
    return {"data/rl_train.parquet": folder.parent.name, "sft/merged/model.safetensors": folder.name}


@pytest.fixture
def played(script, monkeypatch, tmp_path):
    """The names of the runs that are made; nothing is trained."""
    names = []

    def run_cell(cell, config, weights, task, *, steps):
        names.append(cell.name)
        row = {"clipped_low": 0.0, "clipped_high": 0.0, "dropped": 0.0}
        own = {"objective": cell.objective, "staleness": cell.staleness, "bf16": cell.bf16, "seed": cell.seed}
        return {"cell": own, "steps": steps, "before": 0.4, "after": 0.5, "rows": [row]}

    monkeypatch.setattr(script, "ProcessPoolExecutor", lambda most, mp_context, initializer: ThreadPoolExecutor(most))
    monkeypatch.setattr(script, "find_source", lambda folder: SimpleNamespace(digests=digests_of(folder)))
    monkeypatch.setattr(script, "run_cell", run_cell)
    monkeypatch.setattr(script, "load_model", lambda folder: ({}, {}))
    monkeypatch.setattr(script, "read_task", lambda folder: None)
    monkeypatch.setattr(script, "OBJECTIVES", ("dapo", "gspo"))
    return names


def test_a_run_that_is_there_is_not_made_again(script, played, tmp_path, capsys):
    script.main(["--cell", "gspo", "4", "bf16", "1", "--out", str(tmp_path)])
    assert played == ["gspo_s4_bf16_1"]
    script.main(["--out", str(tmp_path)])
    assert len(played) == len(set(played)) == 36
    script.main(["--out", str(tmp_path)])
    assert len(played) == 36 and "36 of 36 runs are done." in capsys.readouterr().out
    assert (tmp_path / "stability_cosine.svg").is_file()


def test_maps_alone_make_no_run(script, played, tmp_path):
    script.main(["--maps", "--out", str(tmp_path)])
    assert not played and (tmp_path / "stability_accuracy.svg").is_file()


def test_a_run_outside_of_the_map_is_refused(script, played, tmp_path):
    with pytest.raises(SystemExit, match="gspo 1 bf16 0 is not in the map"):
        script.main(["--cell", "gspo", "1", "bf16", "0", "--out", str(tmp_path)])


def test_a_run_that_raises_stops_no_other_and_is_tried_again(script, played, monkeypatch, tmp_path):
    plays = script.run_cell

    def fails(cell, *rest, **options):
        if cell.objective == "dapo" and cell.staleness == 16:
            raise RuntimeError("no number")
        return plays(cell, *rest, **options)

    monkeypatch.setattr(script, "run_cell", fails)
    with pytest.raises(SystemExit, match=r"(?s)runs failed.*dapo_s16_fp32_0: Traceback.*no number.*dapo_s16_fp32_2"):
        script.main(["--out", str(tmp_path)])
    assert len(played) == 33 and len((tmp_path / "stability.jsonl").read_text().splitlines()) == 33
    monkeypatch.setattr(script, "run_cell", plays)
    script.main(["--out", str(tmp_path)])
    assert sorted(played[33:]) == [f"dapo_s16_fp32_{seed}" for seed in (0, 1, 2)]


def test_a_result_that_cannot_be_written_ends_the_map(script, played, monkeypatch, tmp_path):
    """Otherwise the pool would play all its runs, for hours, and nobody would write what it finds."""
    plays = script.run_cell

    def full(*_):
        raise OSError("no space left on device")

    def slowly(*rest, **options):
        time.sleep(0.3)
        return plays(*rest, **options)

    monkeypatch.setattr(script, "run_cell", slowly)
    monkeypatch.setattr(script.durable, "append_line", full)
    with pytest.raises(SystemExit, match="no space left"):
        script.main(["--out", str(tmp_path), "--processes", "2"])
    assert len(played) < 10


def test_a_cell_alone_is_not_added_to_runs_of_other_code(script, played, monkeypatch, tmp_path):
    script.main(["--cell", "gspo", "4", "bf16", "1", "--out", str(tmp_path)])
    monkeypatch.setattr(script, "CODE", ("README.md",))
    with pytest.raises(SystemExit, match="gspo_s4_bf16_1 was made with other settings"):
        script.main(["--cell", "dapo", "0", "fp32", "1", "--out", str(tmp_path)])
    assert len(played) == 1


@pytest.mark.parametrize(
    ("others", "seen"),
    [
        (["--steps", "2"], "'steps': 2"),
        (["--quickstart", "another/quickstart"], "parquet': 'another'"),
    ],
)
def test_runs_of_other_settings_are_refused_before_the_first_run(script, played, tmp_path, others, seen):
    cell = ["--cell", "gspo", "4", "bf16", "1", "--out", str(tmp_path)]
    script.main([*cell, *others])
    with pytest.raises(SystemExit, match=rf"(?s)gspo_s4_bf16_1 was made with other settings.*there: .*{seen}"):
        script.main(["--out", str(tmp_path)])
    assert len(played) == 1


def test_the_runs_of_a_seed_begin_from_one_sft_and_those_of_another_seed_may_begin_from_another(
    script, played, monkeypatch, tmp_path
):
    monkeypatch.setattr(script, "SEEDS", (0,))
    script.main(["--out", str(tmp_path)])
    monkeypatch.setattr(script, "SEEDS", (0, 1))
    script.main(["--out", str(tmp_path), "--quickstart", "outputs/of another machine"])
    assert len(played) == 2 * 12 and {each[-1] for each in played[12:]} == {"1"}
    lines = (tmp_path / "stability.jsonl").read_text().splitlines()
    (tmp_path / "stability.jsonl").write_text("\n".join(lines[1:]) + "\n")  # a run of seed 0 is not there
    from_others = "started from the SFT quickstart, but the other runs of seed 0, .* from of another machine"
    with pytest.raises(SystemExit, match=from_others):
        script.main(["--out", str(tmp_path), "--quickstart", "outputs/of another machine"])
    mixed = json.loads(lines[1])
    mixed["settings"]["from"]["sft/merged/model.safetensors"] = "a third"
    (tmp_path / "stability.jsonl").write_text("\n".join([*lines[:1], json.dumps(mixed), *lines[2:]]) + "\n")
    with pytest.raises(SystemExit, match="seed 0"):  # two files of runs were joined
        script.main(["--out", str(tmp_path)])


def test_a_run_that_says_nothing_of_its_settings_is_refused(script, played, tmp_path):
    script.main(["--cell", "gspo", "4", "bf16", "1", "--out", str(tmp_path)])
    line = json.loads((tmp_path / "stability.jsonl").read_text())
    del line["settings"]
    (tmp_path / "stability.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(SystemExit, match="gspo_s4_bf16_1 started from the SFT None"):
        script.main(["--out", str(tmp_path)])


@pytest.mark.nightly
def test_a_process_that_is_killed_costs_the_run_of_no_other(script, monkeypatch, tmp_path, capsys):
    """Real processes: one of two runs kills its own whenever it is played."""
    monkeypatch.setattr(script, "run", _run_or_die)
    cells = {cell: {} for cell in script.cells()[:2]}
    failed = script.run_missing(cells, tmp_path / "stability.jsonl", tmp_path, 1, 2)
    assert [cell.objective for cell in failed] == ["grpo"] and "terminated abruptly" in "".join(failed.values())
    made = [json.loads(line)["cell"] for line in (tmp_path / "stability.jsonl").read_text().splitlines()]
    assert made == ["dapo"]
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("A process was killed")]
    assert told and all("grpo_s0_fp32_0" in line for line in told)


def _run_or_die(cell, quickstart, steps):
    if cell.objective == "grpo":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"cell": cell.objective, "before": 0.0, "after": 0.0, "cpu_s_per_step": 0.0}
