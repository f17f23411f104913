"""An episode as a row of the records."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from verl_ext.episode import (
    MAX_EVIDENCE,
    AgentUse,
    CallResult,
    Episode,
    EpisodeKey,
    Reply,
    Reward,
    Score,
    TokenRow,
    ToolUse,
    Turn,
    TurnCall,
)
from verl_ext.outcome import RolloutEnd
from verl_ext.records import store
from verl_ext.records.problem import problem_of
from verl_ext.records.trajectories import MAX_OUTPUT, problem_columns, to_record, turns_of

SAMPLE = {
    "uid": "u",
    "global_steps": 5,
    "index": 9,
    "data_source": "aime",
    "raw_prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"ground_truth": "2"},
}
SAID = CallResult("Zero", "ZeroDivision", run_s=0.25, attempts=2, stdout="", stderr="Zero", exit_code=1)
RAN = TurnCall("code_interpreter", {"code": "1/0"}, result=SAID, started_s=101.0, queue_s=0.5)
EMPTY = TurnCall(None, malformed="empty_code", result=CallResult("FormatError: empty", "empty_code"))
CALLED = Turn(
    *("<code>1/0</code>", 4, 0, "10.0.0.1:8000", 100.0, 1.0, [RAN, EMPTY]),
    reply=Reply("<interpreter>Zero</interpreter>", 3, 4, ["Zero"]),
)
INFO = {"acc": 1.0, "reward_base": 1.0, "pred": "2", "method": "equal", "verdict": "right", "normalised": "2.0"}
EPISODE = Episode(
    EpisodeKey("u", 2),
    rows=[TokenRow(model_spans=[(0, 4), (7, 8)], version_spans=[(0, 4, 4), (7, 8, 5)])],
    finish_reason=RolloutEnd.ANSWER,
    use=ToolUse(generate_s=1.5, tool_s=1.0, queue_s=0.5, errors={"ZeroDivision": 1}),
    reward=Reward(1.0, INFO),
    turns=[CALLED, Turn("2<|im_end|>", 1, 7, None, 102.0, 0.5, end="<|im_end|>")],
    prompt="1+1?",
    opening={"messages": SAMPLE["raw_prompt"], "tools": []},
    protocol="code",
    sampling={"temperature": 1.0},
    started_s=100.0,
    ended_s=103.0,
    score_s=0.5,
)


def row_of(*calls, **changes):
    """`calls`: those of the only turn then, which is without a reply."""
    episode = replace(EPISODE, turns=[replace(CALLED, calls=[*calls], reply=None)]) if calls else EPISODE
    return problem_columns(SAMPLE, validate=False) | to_record(replace(episode, **changes))


def test_a_row_says_where_it_belongs_what_was_said_and_what_it_earned(tmp_path):
    path = store.path_of(tmp_path, "trajectories", 5)
    store.write(path, "trajectories", [row_of()])
    (row,) = store.rows(tmp_path)
    assert [row[name] for name in ("uid", "session", "step", "index", "domain")] == ["u", 2, 5, 9, "aime"]
    assert [(t["role"], t["text"], t["tokens"], t["start"], t["call"]) for t in row["turns"]] == [
        ("model", "<code>1/0</code>", 4, 0, 0),
        ("tool", "<interpreter>Zero</interpreter>", 3, 4, 0),
        ("model", "2<|im_end|>", 1, 7, None),
    ]
    ends = [(turn["end"], turn["shown"]) for turn in row["turns"]]
    assert ends == [("", None), (None, ["Zero"]), ("<|im_end|>", None)]
    assert json.loads(row["opening"]) == {"messages": SAMPLE["raw_prompt"], "tools": []} and row["protocol"] == "code"
    assert json.loads(row["task"]) == {"extra_info": None}
    assert (row["response_tokens"], row["model_tokens"]) == (8, 5)
    ran, malformed = row["calls"]
    assert (ran["code"], ran["stdout"], ran["stderr"], ran["exit_code"]) == ("1/0", "", "Zero", 1)
    assert (ran["status"], ran["fault"], ran["attempts"], ran["turn"]) == ("ZeroDivision", "model", 2, 0)
    assert (malformed["status"], malformed["fault"], malformed["tool"]) == ("malformed:empty_code", "model", None)
    assert row["version_spans"][1] == {"start": 7, "end": 8, "version": 5, "row": 0}
    assert (row["end_reason"], row["fault"], row["acc"], row["score"]) == ("answer", "none", 1.0, 1.0)
    assert row["verdict"] == {"extracted": "2", "normalised": "2.0", "rule": "equal", "text": "right"}
    assert json.loads(row["reward_parts"])["reward_base"] == 1.0
    times = {"queue_s": 0.5, "generate_s": 1.5, "tool_s": 1.0, "score_s": 0.5, "started_s": 100.0, "ended_s": 103.0}
    assert row["timings"] == times
    assert (ran["started_s"], ran["queue_s"], ran["run_s"], ran["tool"]) == (101.0, 0.5, 0.25, "code_interpreter")
    assert row["prompt"] == "1+1?" and json.loads(row["sampling"]) == {"temperature": 1.0}
    assert json.loads(row["tool_use"])["errors"] == {"ZeroDivision": 1}


def test_a_failure_of_the_sandbox_is_the_infrastructures_and_has_no_verdict():
    failed = replace(RAN, result=CallResult("", failure="no answer"))
    row = row_of(failed, finish_reason=RolloutEnd.SANDBOX_FAILURE)
    assert (row["end_reason"], row["fault"], row["acc"]) == ("sandbox_failure", "infrastructure", None)
    assert row["score"] is None, "what the reward manager gives in place of one is in `reward_parts`"
    assert row["exception"] == "no answer" and row["calls"][0]["fault"] == "infrastructure"
    unverified = row_of(reward=Reward(0.0, {"acc": 0.0, "unverified": 1.0, "finish_reason": "answer"}))
    assert (unverified["end_reason"], unverified["acc"]) == ("verifier_unknown", None)


def test_the_exception_names_the_servers_that_were_lost_and_what_the_verifier_said():
    aborted = row_of(finish_reason="aborted", lost_servers=["10.0.0.1:9000", "10.0.0.2:9000"])
    assert aborted["exception"] == "no answer of 10.0.0.1:9000, 10.0.0.2:9000" and aborted["fault"] == "infrastructure"
    assert row_of(finish_reason="answer", lost_servers=["10.0.0.1:9000"])["exception"] is None  # it continued elsewhere
    info = {"acc": 0.0, "unverified": 1.0, "finish_reason": "answer", "verdict": "its process was killed"}
    assert row_of(reward=Reward(0.0, info))["exception"] == "its process was killed"


def test_a_call_that_was_not_run_and_one_of_another_tool_have_their_arguments():
    (call,) = row_of(TurnCall("price_of", {"item": "tea"}))["calls"]
    assert (call["status"], call["code"], call["fault"]) == ("not_run", '{"item": "tea"}', None)


def test_the_turns_of_a_record_are_those_of_the_episode(tmp_path):
    """Of programs, malformed calls, another tool's call, one that failed and one not run, and of a branch; the output
    of a call is what the model was shown."""
    malformed = replace(EMPTY, result=CallResult("FormatError: empty", "empty_code"))
    priced = TurnCall("price_of", {"item": "tea"}, result=CallResult("3", run_s=0.5), started_s=104.0, queue_s=0.25)
    failed = TurnCall("price_of", {"item": "jam"}, result=CallResult("", failure="no answer"), started_s=105.0)
    called = replace(CALLED, calls=[RAN, malformed, priced, failed, TurnCall("price_of", {"item": "ham"})])
    called.reply = replace(CALLED.reply, shown=["Zero", "FormatError: empty", "3"])
    branch = Turn("c", 2, 0, "10.0.0.1:8000", 102.0, 1.0, parent=0, row=1, fork="history")
    said = Reply("And 2+2?", 5, 8, ["And 2+2?"], "user")
    nested = replace(RAN, arguments={"code": '{"a":' * 10**5})
    turns = [
        called,
        replace(EPISODE.turns[1], calls=[nested], reply=said),
        branch,
        replace(branch, parent=-1),
        replace(branch, parent=1),
    ]
    path = store.path_of(tmp_path, "trajectories", 5)
    store.write(path, "trajectories", [row_of(turns=turns)])
    (row,) = store.rows(tmp_path)
    assert turns_of(row) == turns_of(row_of(turns=turns)) == turns


def test_a_rollout_that_raised_has_its_own_row():
    why = "KeyError: 'x'"
    raised = Episode(EpisodeKey("u", 3), finish_reason=RolloutEnd.RAISED, exception=why, started_s=1.0, ended_s=2.0)
    row = problem_columns(SAMPLE, validate=True) | to_record(raised)
    assert (row["end_reason"], row["exception"], row["fault"]) == ("raised", "KeyError: 'x'", "ours")
    assert (row["uid"], row["session"]) == ("u", 3) and row["validate"] is True
    assert row["timings"] == {"score_s": 0.0, "started_s": 1.0, "ended_s": 2.0}


def test_an_episode_of_another_projects_loop_has_a_row_without_turns_and_seconds(tmp_path):
    other = Episode(EpisodeKey("u", 1), rows=[TokenRow(ids=[1, 2])], reward=Reward(1.0, {"acc": 1.0}))
    row = problem_columns(SAMPLE, validate=False) | to_record(other)
    store.write(store.path_of(tmp_path, "trajectories", 5), "trajectories", [row])
    (found,) = store.rows(tmp_path)
    assert (found["turns"], found["calls"], found["version_spans"], found["response_tokens"]) == ([], [], [], 0)
    assert (found["end_reason"], found["fault"], found["acc"], found["tool_use"]) == ("", None, 1.0, "{}")
    assert found["timings"]["generate_s"] is None


def test_the_record_has_the_spans_of_all_rows_of_an_episode():
    rows = [TokenRow(version_spans=[(0, 4, 4)]), TokenRow(version_spans=[(0, 2, 5)])]
    assert [(span["row"], span["version"]) for span in row_of(rows=rows)["version_spans"]] == [(0, 4), (1, 5)]


def test_a_row_names_its_problem_its_id_and_a_gold_of_any_form():
    other = SAMPLE | {"uid": "other", "index": 1, "extra_info": {"id": 7}}
    columns = problem_columns(other, validate=True)
    assert (columns["problem"], columns["id"], columns["ground_truth"]) == (problem_of(other), "7", "2")
    odd = SAMPLE | {"reward_model": {"ground_truth": {"b": "\ud800", "a": [1]}}, "extra_info": None}
    columns = problem_columns(odd, validate=True)
    assert (columns["id"], columns["ground_truth"]) == (None, '{"a": [1], "b": "\\ud800"}')
    assert json.loads(columns["task"])["ground_truth"] == odd["reward_model"]["ground_truth"]


def test_a_row_has_what_environment_and_verifier_read():
    """With it, the calls of a response can be run again and its answer be judged again."""
    info = {"setup_code": "x = 1", "tool_selection": np.array(["a"])}
    task = problem_columns(SAMPLE | {"extra_info": info, "tools_kwargs": {"a": {"n": 1}}}, validate=False)["task"]
    found = {"extra_info": {"setup_code": "x = 1", "tool_selection": ["a"]}, "tools_kwargs": {"a": {"n": 1}}}
    assert json.loads(task) == found


def test_what_a_user_replied_is_a_turn_of_the_user():
    reply = Reply("<|im_start|>user\nAnd 2+2?<|im_end|>", 5, 8, ["And 2+2?"], "user")
    _, user = row_of(turns=[Turn("2", 1, 0, None, 102.0, 0.5, reply=reply)])["turns"]
    assert (user["role"], user["shown"], user["text"]) == ("user", ["And 2+2?"], reply.text)


def test_a_turn_says_which_server_wrote_it_and_when():
    found = [tuple(map(turn.get, ("role", "server", "started_s", "generate_s"))) for turn in row_of()["turns"]]
    assert found == [("model", "10.0.0.1:8000", 100.0, 1.0), ("tool", None, None, None), ("model", None, 102.0, 0.5)]


def test_a_lone_surrogate_of_the_model_costs_no_file(tmp_path):
    """JSON lets a model write one into a call; no file takes it."""
    lone = "\ud800"
    calls = [
        TurnCall("search", {"code": lone}, result=replace(SAID, stdout=lone, stderr=lone, output=lone), started_s=1.0),
        replace(EMPTY, result=CallResult(lone)),
        TurnCall("search", {"query": lone}),
    ]
    row = row_of(*calls, reward=Reward(1.0, INFO | {"pred": lone, "normalised": lone}))
    raised = Episode(EpisodeKey("u", 1), finish_reason=RolloutEnd.RAISED, exception=f"ValueError: {lone}")
    raised = problem_columns(SAMPLE, validate=False) | to_record(raised)
    store.write(store.path_of(tmp_path, "trajectories", 5), "trajectories", [row, raised])
    found, other = store.rows(tmp_path)
    assert [call["stdout"] for call in found["calls"]] == ["\\ud800", "\\ud800", None]
    assert found["calls"][0]["code"] == found["verdict"]["extracted"] == "\\ud800"
    assert json.loads(found["reward_parts"])["pred"] == lone and other["exception"] == "ValueError: \\ud800"


def test_a_number_of_numpy_is_a_number_in_the_json():
    parts = row_of(reward=Reward(1.0, {"acc": 1.0, "bonus": np.float32(0.5), "path": Path("x")}))["reward_parts"]
    assert json.loads(parts) == {"acc": 1.0, "bonus": 0.5, "path": "x"}


@pytest.mark.parametrize("acc", [np.bool_(True), True, np.float32(1.0), "1", 1])
def test_a_verdict_of_another_type_is_a_number(tmp_path, acc):
    """A custom verifier may return what `np.isclose` does: one row like that would cost all records of its step."""
    row = row_of(reward=Reward(acc, {"acc": acc}))
    store.write(store.path_of(tmp_path, "trajectories", 5), "trajectories", [row])
    assert [(row["acc"], row["score"]) for row in store.rows(tmp_path)] == [(1.0, 1.0)]


@pytest.mark.parametrize(
    ("index", "stored"),
    [(9, 9), (np.int64(9), 9), (None, None), ("9a9b6eb4-a1cb", None), (np.str_("9"), None), (True, None), (0.5, None)],
)
def test_an_index_that_is_not_a_number_is_left_out_and_costs_no_row(tmp_path, index, stored):
    """DAPO-Math-17k has a UUID in `extra_info.index`."""
    row = row_of() | problem_columns(SAMPLE | {"index": index}, validate=False)
    store.write(store.path_of(tmp_path, "trajectories", 5), "trajectories", [row])
    assert [row["index"] for row in store.rows(tmp_path)] == [stored]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_of_a_long_output_both_ends_are_kept(stream):
    said = "first" + "x" * 10**6 + "last"
    call = row_of(replace(RAN, result=replace(SAID, **{stream: said})))["calls"][0]
    assert call[stream].startswith("firstxxx") and call[stream].endswith("xxxlast")
    assert len(call[stream]) < MAX_OUTPUT + 100
    assert f"[{len(said) - MAX_OUTPUT} characters are not recorded]" in call[stream]


def test_a_row_has_the_evidence_of_its_score_if_it_is_not_too_large():
    def evidence(data):
        return row_of(score=Score.graded(1.0, "", "tests", evidence=data))["evidence"]

    assert base64.b64decode(evidence(b"files")) == b"files"
    assert len(evidence(bytes(MAX_EVIDENCE))) > MAX_EVIDENCE
    assert [evidence(b""), evidence(bytes(MAX_EVIDENCE + 1)), row_of()["evidence"]] == [None] * 3


def test_a_conversation_that_branches_keeps_its_tree():
    """The third turn goes on from the first in a row of its own, the fourth begins anew after an edit, and the
    fifth goes on from the second, whose place in the record is after the reply."""
    said = Reply("ok", 2, 3, ["ok"], "user")
    turns = [
        Turn("a", 3, 0, None, 100.0, 1.0, reply=said),
        Turn("b", 1, 5, None, 101.0, 1.0),
        Turn("c", 2, 0, None, 102.0, 1.0, parent=0, row=1),
        Turn("d", 4, 0, None, 103.0, 1.0, parent=-1, row=2, fork="history"),
        Turn("e", 1, 6, None, 104.0, 1.0, parent=1),
    ]
    spans = [[(0, 3, 6), (5, 6, 7)], [(0, 2, 7)], [(0, 4, 7)]]
    rows = [TokenRow(version_spans=own) for own in spans]
    found = row_of(turns=turns, rows=rows, agent=AgentUse(requests=5, forks={"history": 1}))
    told = [tuple(turn.get(name) for name in ("text", "parent", "row", "fork")) for turn in found["turns"]]
    assert told == [
        ("a", None, 0, None),
        ("ok", None, 0, None),
        ("b", None, 0, None),
        ("c", 0, 1, None),
        ("d", -1, 2, "history"),
        ("e", 2, 0, None),
    ]
    versions = [(each["row"], each["start"], each["end"], each["version"]) for each in found["version_spans"]]
    assert versions == [(0, 0, 3, 6), (0, 5, 6, 7), (1, 0, 2, 7), (2, 0, 4, 7)]
    agent = json.loads(found["agent"])
    assert (agent["requests"], agent["forks"]) == (5, {"history": 1}) and row_of()["agent"] is None
    assert (found["response_tokens"], found["model_tokens"]) == (13, 11)
