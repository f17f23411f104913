"""`ablation`: its figures on a run that a reader can redo on paper, its rows, its gate, its table."""

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_ext.records import store
from verl_ext.runs.lock import lock_folder
from verl_ext.settings import compose_run

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script():
    from scripts.studies import ablation

    return ablation


@pytest.fixture
def run(tmp_path):
    """Six steps, of which 3 and 4 are the window: from 100 s, where step 2 ends, to 120 s."""
    intervals = {
        2: [("wait", 90, 95), ("weight_sync", 95, 100)],
        3: [("wait", 100, 104), ("update", 104, 107), ("weight_sync", 107, 110)],
        4: [("wait", 110, 112), ("update", 112, 117), ("weight_sync", 117, 120)],
        5: [("wait", 120, 130)],
    }
    for step, rows in intervals.items():
        rows = [{"step": step, "what": what, "start_s": start, "end_s": end} for what, start, end in rows]
        store.write(store.path_of(tmp_path, "timeline", step), "timeline", rows)

    def turn(start_s, seconds, tokens, before=0):
        return {"role": "model", "tokens": tokens, "start": before, "started_s": start_s, "generate_s": seconds}

    tool = {"role": "tool", "tokens": 9, "start": 40, "started_s": None, "generate_s": None}
    rollouts = {
        3: [([turn(95.0, 10.0, 40), tool], 40), ([turn(90.0, 10.0, 50)], 50)],
        4: [([turn(102.0, 4.0, 8, before=10)], 8)],
        5: [([turn(115.0, 10.0, 30)], 30), (None, None)],  # one raised
    }
    for step, rows in rollouts.items():
        rows = [{"turns": turns, "model_tokens": tokens, "trained_step": step} for turns, tokens in rows]
        rows = [row | {"outcome": "trained"} for row in rows]
        store.write(store.path_of(tmp_path, "trajectories", step), "trajectories", rows)
    metrics = [{"step": step, "data": {"prompt_length/mean": 20.0}} for step in range(1, 6)]
    (tmp_path / "metrics-1.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in metrics))
    return tmp_path


def test_the_figures_are_those_of_the_window(script, run):
    """Of four requests one ended before the window; half of the first and of the last lie in it, and all of the third.

    sampled       40 / 2 + 8 + 30 / 2 = 43 tokens in 20 s
    trained       40 + 50 + 8 = 98, in steps 3 and 4
    under way     [100, 106] and [115, 120]: 11 s, so that the server waits for 9 of 20
    learner       4 + 2 of 20 s
    decode steps  [100, 105] at 40 / 10, [105, 106] at 8 / 4, [115, 120] at 30 / 10: 20 + 2 + 15 = 37
    tokens read   half of 40 x (20 + 39 / 2), 8 x (20 + 10 + 7 / 2), half of 30 x (20 + 29 / 2): 790 + 268 + 517.5
    """
    found = script.figures_of(run, script.Model(parameters=1000, kv_bytes=8), steps=6)
    assert found == pytest.approx(
        {
            "sampled_per_s": 43 / 20,
            "trained_per_s": 98 / 20,
            "flops_per_s": 1000 * (2 * 43 + 6 * 98) / 20,
            "bytes_per_s": (37 * 1000 * 4 + 1575.5 * 8) / 20,
            "server_waits": 9 / 20,
            "learner_waits": 6 / 20,
        }
    )


def test_what_fills_a_batch_costs_and_is_not_trained(script, run):
    path = store.path_of(run, "trajectories", 4)
    store.write(
        path, "trajectories", [row | {"outcome": "equal"} for row in store.rows(run) if row["trained_step"] == 4]
    )
    found = script.figures_of(run, script.Model(parameters=1000, kv_bytes=8), steps=6)
    assert found["trained_per_s"] == 90 / 20 and found["flops_per_s"] == 1000 * (2 * 43 + 6 * 98) / 20


def test_a_request_that_an_update_breaks_off_is_nowhere_until_it_is_asked_again(script, run):
    """Updates come at 107 and 117 s; the last request, of 115 to 125 s, has 30 tokens in 2 and 7 s: 6 2/3 and 23 1/3.

    sampled       20 + 8 + 6 2/3 + 23 1/3 x 2 / 7 = 41 1/3
    under way     [100, 106], [115, 117], [118, 120]: 10 s
    """
    found = script.figures_of(run, script.Model(parameters=1000, kv_bytes=8), steps=6, breaks_off=True)
    assert found["sampled_per_s"] * 20 == pytest.approx(20 + 8 + 20 / 3 + 70 / 3 * 2 / 7)
    assert found["server_waits"] == pytest.approx(10 / 20)
    whole = [script.Request(0.0, 10.0, 20, 5.0)]
    assert script.broken_off(whole, [9.5, 4.0, 4.5]) == [  # 8.5 s; at 4.5 s there is nothing to interrupt
        script.Request(0.0, 4.0, pytest.approx(20 * 4 / 8.5), 5.0),
        script.Request(5.0, 9.5, pytest.approx(20 * 4.5 / 8.5), pytest.approx(5 + 20 * 4 / 8.5)),
    ]


def test_where_requests_wait_for_room_a_step_has_as_many_tokens_as_there_is_room(script, run):
    """A hundred more requests of 10 tokens between 105 and 115 s: 100 tokens a second, 32 of them a step."""
    turn = {"role": "model", "tokens": 10, "start": 0, "started_s": 105.0, "generate_s": 10.0}
    more = [{"turns": [turn], "model_tokens": 10, "trained_step": 5, "outcome": "trained"}] * 100
    before = script.figures_of(run, script.Model(parameters=1000, kv_bytes=0), steps=6)
    store.write(store.path_of(run, "trajectories", 6), "trajectories", more)
    found = script.figures_of(run, script.Model(parameters=1000, kv_bytes=0), steps=6)
    # The second from 105 to 106 s had 2 steps, of the request of 102 s.
    steps = (found["bytes_per_s"] - before["bytes_per_s"]) * 20 / 4000
    assert steps == pytest.approx((100 + 2) / 32 - 2 + 9 * 100 / 32)


def test_a_run_that_ended_early_has_no_figures(script, run):
    with pytest.raises(ValueError, match="has nothing of step 6"):
        script.figures_of(run, script.Model(1000, 8), steps=8)


def test_the_model_has_its_parameters_and_keys_and_values_of_four_bytes(script, tmp_path):
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 3, "num_attention_heads": 6, "hidden_size": 12}
    sizes |= {"model_type": "qwen2", "intermediate_size": 5, "vocab_size": 7, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    # A layer: q, k, v with biases 12 x 24 + 24, o 12 x 12, gate, up and down 3 x 12 x 5, two norms of 12: 660.
    # Keys and values of 2 layers, 3 heads of 12 / 6 = 2 numbers, each of 4 bytes.
    assert script.read_model(tmp_path) == script.Model(2 * 660 + 7 * 12 + 12, 2 * 2 * 3 * 2 * 4)


def test_a_static_batch_begins_when_all_of_the_one_before_has_ended(script):
    from scripts.studies.static_batches import Gate

    async def main():
        gate, inside, began = Gate(2), set(), []

        async def rollout(name, rounds):
            async with gate:
                inside.add(name)
                began.append((name, sorted(inside)))
                for _ in range(rounds):
                    await asyncio.sleep(0)
                inside.remove(name)

        await asyncio.wait_for(asyncio.gather(*map(rollout, "abcde", (1, 50, 50, 1, 1))), timeout=10)
        return began

    # continuous batching would begin c while b runs
    assert asyncio.run(main()) == [("a", ["a"]), ("b", ["a", "b"]), ("c", ["c"]), ("d", ["c", "d"]), ("e", ["e"])]


def test_a_rollout_that_raises_leaves_its_batch(script):
    from scripts.studies.static_batches import Gate

    async def main():
        gate = Gate(1)
        with pytest.raises(ZeroDivisionError):
            async with gate:
                raise ZeroDivisionError
        async with asyncio.timeout(10), gate:
            return True

    assert asyncio.run(main())


def value_of(config, key, default=None):
    return OmegaConf.select(config, key, default=default)


def test_rows_differ_in_what_they_name_and_every_run_can_have_it(script):
    from verl.utils.import_utils import load_class_from_fqn

    from scripts.studies.static_batches import SIZE, StaticBatchManager
    from verl_ext.fleet import weight_update

    found = {}
    for row in script.ROWS:
        words = script.command_of(row, 1, 12, [])[2:]
        config = compose_run("tiny_dapo", [f"+{word}" if word.startswith("objective=") else word for word in words])
        assert not list(weight_update.refusals(partial(value_of, config)))
        rollout = config.actor_rollout_ref.rollout
        assert (rollout.max_num_seqs, rollout.seed, config.trainer.total_training_steps) == (SIZE, 1, 12)
        assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "retool_glm5_async"
        manager = load_class_from_fqn(rollout.agent.agent_loop_manager_class)
        found[row] = (config.trainer.v1.trainer_mode, manager.__name__, config.retool.fleet.weight_update)
    assert load_class_from_fqn(script.ROWS["static"][1][0].partition("=")[2]) is StaticBatchManager
    assert found == {
        "static": ("sync", "StaticBatchManager", "abort"),
        "continuous": ("sync", "LeanAgentLoopManager", "abort"),
        "in_server": ("sync", "InServerAgentLoopManager", "abort"),
        "abort": ("separate_async", "InServerAgentLoopManager", "abort"),
        "keep": ("separate_async", "InServerAgentLoopManager", "keep"),
    }


PUBLISHED = {
    "sampled_per_s": 200.0,
    "trained_per_s": 150.0,
    "flops_per_s": 5e8,
    "bytes_per_s": 1e8,
    "server_waits": 0.25,
    "learner_waits": 0.5,
    "peak_flops": 4e10,
    "peak_bytes": 1e10,
}


def test_the_table_divides_by_the_highest_peak(script):
    """5e8 of 5e10 FLOPs are 1%; 1e8 and 3e8 of 1e10 bytes are 1% and 3%: mean 2, deviation sqrt 2."""
    runs = {"static": [PUBLISHED, PUBLISHED | {"bytes_per_s": 3e8, "peak_flops": 5e10}]}
    lines = script.row_table(runs).splitlines()
    assert lines[2] == (
        "| static batches | 2 | 200 ± 0 | 150 ± 0 | 1.00 ± 0.00 | 2.00 ± 1.41 | 25.0 ± 0.0 | 50.0 ± 0.0 |"
    )
    assert lines[-1] == "Peaks: 50 GFLOP/s, 10.0 GB/s."


def test_the_page_has_the_speeds_of_the_published_results(script):
    evidence = REPO / "docs" / "evidence"
    lines = (evidence / "async" / "ablation.jsonl").read_text().splitlines()
    runs = {row["run"]: row for row in map(json.loads, lines)}
    found = {row: [runs[f"{row}_{number}"] for number in range(3)] for row in script.ROWS}
    printed = [line.split(" | ") for line in script.row_table(found).splitlines() if " ± " in line]
    page = (evidence / "async.md").read_text(encoding="utf-8").replace(",", "")
    assert [cells[2] for cells in printed] == re.findall(r"^\| [^|]* \| (\d+ ± \d+) \| \d+% \|", page, re.M)
    for row, (_, overrides) in script.ROWS.items():
        settings = [run["settings"]["overrides"] for run in found[row]]
        assert settings == [[*overrides, *script.SHARED]] * 3


def test_rows_take_turns_and_a_published_run_is_not_made_again(script, tmp_path, monkeypatch, capsys):
    began = []
    monkeypatch.setattr(script, "find_source", lambda folder: SimpleNamespace(digests={"sft": folder.name}))
    monkeypatch.setattr(script, "launch", lambda command, source, out, *rest: began.append((out.name, *rest)))
    monkeypatch.setattr(script, "peaks", lambda: {"peak_flops": 4e10, "peak_bytes": 1e10})
    monkeypatch.setattr(script, "read_model", lambda folder: None)
    broken = {}

    def figures_of(run, model, steps, *, breaks_off):
        broken[run.name] = breaks_off
        return dict(list(PUBLISHED.items())[:-2])

    monkeypatch.setattr(script, "figures_of", figures_of)
    options = ["--row", "static", "keep", "--repeats", "2", "--out", str(tmp_path)]
    script.main([*options, "--max-runs", "1"])
    assert began == [("static_0", 0.5, 0, 900)] and "| static batches | 1 | 200 |" in capsys.readouterr().out
    script.main(options)
    assert [name for name, *_ in began] == ["static_0", "keep_0", "static_1", "keep_1"]
    with pytest.raises(SystemExit):
        script.main([*options, "--steps", "4"])
    assert "leaves no step in the window; expected at least 5" in capsys.readouterr().err
    monkeypatch.setattr(script, "SHARED", (*script.SHARED, "objective=grpo"))
    with pytest.raises(SystemExit, match="static_0 was made with other settings"):
        script.main(options)
    monkeypatch.setattr(script, "SHARED", script.SHARED[:-1])
    for others in (["--mean-s", "2"], ["--from", "another"]):
        with pytest.raises(SystemExit, match="static_0 was made with other settings"):
            script.main([*options, *others])
    left = tmp_path / "static_2" / "metrics-1.jsonl"
    left.parent.mkdir()
    left.touch()
    with lock_folder(left.parent), pytest.raises(SystemExit, match="Another run writes into"):
        script.main([*options, "--repeats", "3"])
    assert left.exists(), "a run of a script that was killed goes on there"
    script.main([*options, "--repeats", "3"])
    assert not left.exists() and began[-2][0] == "static_2"
    script.main(["--row", "abort", "--repeats", "1", "--out", str(tmp_path)])
    assert {name for name, is_broken in broken.items() if is_broken} == {"abort_0"}


def test_peaks_are_those_of_a_machine(script):
    found = script.peaks()
    assert 1e8 < found["peak_flops"] < 1e15 and 1e8 < found["peak_bytes"] < 1e13
