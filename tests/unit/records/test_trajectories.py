import json

from verl_ext.records.trajectories import TrajectoryLog, trajectory_record


def test_a_character_that_no_text_can_have_is_kept(tmp_path):
    log = TrajectoryLog(tmp_path, max_mb=1, max_files=2)
    log.write({"code": "print('\ud800\u20ac')"})
    assert lines_of(tmp_path) == [{"code": "print('\ud800\u20ac')"}]


def lines_of(folder):
    return [json.loads(line) for path in folder.iterdir() for line in open(path, encoding="utf-8")]


def test_files_rotate_and_the_oldest_goes(tmp_path):
    log = TrajectoryLog(tmp_path / "trajectories", max_mb=1000 / 2**20, max_files=3)
    for i in range(100):
        log.write({"i": i, "text": "x" * 80 + "\n\u2028<|im_end|>"})
    files = sorted((tmp_path / "trajectories").iterdir())
    assert len(files) == 3 and all(path.stat().st_size <= 1000 for path in files)
    numbers = sorted(record["i"] for record in lines_of(tmp_path / "trajectories"))
    assert numbers == list(range(numbers[0], 100)) and 15 < len(numbers) < 30


def test_a_limit_below_a_byte_is_a_limit(tmp_path):
    log = TrajectoryLog(tmp_path, max_mb=1e-9, max_files=2)  # 0 bytes would be no limit to Python
    for i in range(4):
        log.write({"i": i})
    assert lines_of(tmp_path) in ([{"i": 2}, {"i": 3}], [{"i": 3}, {"i": 2}])


def test_a_process_with_the_name_and_number_of_a_killed_one_does_not_join_its_half_line(tmp_path):
    TrajectoryLog(tmp_path, max_mb=1, max_files=2).write({"i": 1})
    (file,) = tmp_path.iterdir()
    with open(file, "a") as left:
        left.write('{"i": 2, "te')
    TrajectoryLog(tmp_path, max_mb=1, max_files=2).write({"i": 3})
    assert lines_of(tmp_path) == [{"i": 1}, {"i": 3}]


def test_a_record_says_where_it_belongs_how_it_ended_and_what_it_earned():
    trajectory = {"prompt": "1+1?", "turns": [{"text": "2", "calls": []}], "seeds": {"data": 1}}
    extra_fields = {
        "finish_reason": "answer",
        "min_global_steps": 3,
        "max_global_steps": 4,
        "tool_use": {"ok": 1},
        "reward_extra_info": {"acc": 0.0, "unverified": 1.0, "reward_base": 0.0, "finish_reason": "answer"},
        "model_spans": [(0, 2)],
    }
    sample = {"uid": "u", "session_id": 2, "global_steps": 5, "index": 9, "data_source": "aime"}
    sample["reward_model"] = {"ground_truth": "2"}
    record = trajectory_record(trajectory, extra_fields, sample, validate=False)
    assert (record["uid"], record["session"], record["step"], record["index"]) == ("u", 2, 5, 9)
    assert record["finish_reason"] == "verifier_unknown" and record["versions"] == [3, 4]
    assert record["reward"]["reward_base"] == 0.0 and record["ground_truth"] == "2"
    assert record["turns"] == trajectory["turns"] and record["seeds"] == {"data": 1}
    assert record["tool_use"] == {"ok": 1} and record["validate"] is False
