"""The columns of a run's records, version 3: `RUN/records/{trajectories,tokens,timeline,waiting}/<name>.parquet`.

`recorder.py` writes them, `store.py` reads them. A file holds one step: `step_000017.parquet` of training has the
rollouts of the prompts whose fate step 17 decided, `val_000020.parquet` those of the validation after step 20.
`waiting` has the rollouts whose fate was open at a checkpoint, for a run that resumes from it.
The vocabulary is that of verl_ext/outcome.py. `started_s`, `ended_s`, `start_s` and `end_s` are seconds since 1970; the
other times are durations in seconds. A column whose value is not known is null.
"""

import pyarrow as pa

VERSION = "3"
VERSION_KEY = b"retool_schema"  # of a file's metadata
CPU_KEY = b"retool_cpu_s"  # of the trajectories of a step
LOST_KEY = b"retool_lost"  # of the trajectories of a step: groups that the step decided but that never arrived

_S = pa.float64()  # seconds


def _struct(**fields: pa.DataType) -> pa.StructType:
    return pa.struct(list(fields.items()))


TURN = _struct(
    role=pa.string(),  # "model"; or "tool", one for all that the tools of a turn returned; or "user", who replied to it
    text=pa.string(),
    end=pa.string(),  # the end token's part of the text of a model's turn, "" if none ended it
    shown=pa.list_(pa.string()),  # the text of another turn without its frame: of each call, or of each message
    tokens=pa.int32(),
    start=pa.int32(),  # tokens of the response before it
    call=pa.int32(),  # first call of a model's turn, or first that a tool's turn answers: an index into `calls`
    server=pa.string(),  # address and port of the server that wrote a model's turn, or its newest part
    started_s=_S,
    generate_s=_S,  # from the request to the end, including the wait for the server
    # Of an agent's conversation that branches (verl_ext/gateway):
    parent=pa.int32(),  # index into `turns` of the model's turn that it continues from; null: the one before; -1: none
    row=pa.int32(),  # the row of the episode that trains it; `start` is a place in that row's response
    fork=pa.string(),  # why its prompt was rendered anew: history, tools, template; null if it was not
)
CALL = _struct(
    turn=pa.int32(),  # index into `turns` of the model's turn that made it
    tool=pa.string(),  # null: a call that could not be run
    code=pa.string(),  # the program, or the arguments of another tool as JSON
    # The tool's output, with stderr and exit code in it if the tool gives only one text. Of a long one, both ends.
    stdout=pa.string(),
    stderr=pa.string(),
    status=pa.string(),  # "ok", "error", "timeout", ...: `tool_use`'s words; "not_run"
    fault=pa.string(),  # of outcome.Fault; null if the call ended well or was not run
    exit_code=pa.int32(),
    queue_s=_S,  # all of its time except `run_s`: queues, the way there and back, lost attempts
    run_s=_S,
    attempts=pa.int32(),
    started_s=_S,
)
VERSION_SPAN = _struct(  # tokens [start, end) of a row's response
    start=pa.int32(), end=pa.int32(), version=pa.int32(), row=pa.int32()
)
VERDICT = _struct(extracted=pa.string(), normalised=pa.string(), rule=pa.string(), text=pa.string())
TIMINGS = _struct(queue_s=_S, generate_s=_S, tool_s=_S, score_s=_S, started_s=_S, ended_s=_S)

TRAJECTORIES = pa.schema(
    {
        "uid": pa.string(),  # of one draw of a prompt, and so of the group of its rollouts
        "session": pa.int32(),  # number of the rollout in its group
        "step": pa.int32(),  # the step in which the prompt was handed to the agent loops; of a validation, its step
        "validate": pa.bool_(),
        "index": pa.int64(),  # row of the data set; null if the data set has no number there
        "problem": pa.string(),  # its name, the same over time and runs (problem.py)
        "id": pa.string(),  # `extra_info.id` of the data; problems made from one template share it
        "domain": pa.string(),  # `data_source`
        "ability": pa.string(),  # it or `data_source` chooses the verifier
        "prompt": pa.string(),  # as the model saw it, with the template's special tokens
        "opening": pa.string(),  # JSON: `messages` and `tools` that this prompt was made of
        "protocol": pa.string(),  # of retool.protocol
        # JSON: `extra_info` of the row, and if there are any, its `tools_kwargs` and a `ground_truth` that is no text
        "task": pa.string(),
        "ground_truth": pa.string(),
        "turns": pa.list_(TURN),
        "calls": pa.list_(CALL),
        "version_spans": pa.list_(VERSION_SPAN),
        "end_reason": pa.string(),  # of outcome.RolloutEnd
        "exception": pa.string(),  # the exception raised, or the message of the tool's failure
        "fault": pa.string(),  # of outcome.Fault
        "score": pa.float64(),  # null if infrastructure failed, like `acc`
        "acc": pa.float64(),
        "reward_parts": pa.string(),  # JSON: all that the reward manager reports
        "verdict": VERDICT,
        "outcome": pa.string(),  # of outcome.PromptEnd
        "outcome_why": pa.string(),
        "trained_step": pa.int32(),  # the step whose batch took the rollout, as useful or as a filler
        "advantage": pa.float64(),  # the estimator's; 0 for a rollout that trains nothing; null if its tokens differ
        "response_tokens": pa.int32(),
        "model_tokens": pa.int32(),
        "timings": TIMINGS,
        "sampling": pa.string(),  # JSON: seeds, temperature, top_p, top_k
        "tool_use": pa.string(),  # JSON: the counts of rollout/tool_use.py
        # Base64 of the files from which the environment can score the episode again (`retool environments reverify`);
        # null if the environment keeps none.
        "evidence": pa.string(),
        "agent": pa.string(),  # JSON: the counts of episode.AgentUse; null if no agent with a base_url made the episode
    }
)

TOKENS = pa.schema(
    {
        "uid": pa.string(),
        "session": pa.int32(),
        "row": pa.int32(),  # of the episode
        "step": pa.int32(),  # the step whose update trained on it
        "position": pa.int32(),  # in the row's response, from 0
        "id": pa.int32(),
        "text": pa.string(),  # "" for a part of a character, whose text a later token has
        "mask": pa.bool_(),  # whether the token trains
        "turn": pa.int32(),  # index into those of `turns` that are of this row
        "version": pa.int32(),  # of the weights that wrote it; null for tool output
        "rollout_log_prob": pa.float32(),
        "old_log_prob": pa.float32(),
        "log_prob": pa.float32(),  # as the update had it, before its optimiser step
        "ratio": pa.float32(),  # of this token; gspo clips the mean of a response
        "advantage": pa.float32(),  # as the loss had it, with the factor of `policy_loss.unit` and of padding
        # "kept", "clipped_low", "clipped_high", "dropped:<correction>", "masked"; null with verl's losses but `vanilla`
        "decision": pa.string(),
    }
)

# `what` the trainer did: log_probs (also of the reference), score (by a model on the same GPUs), update, weight_sync,
# wait, save, validate
TIMELINE = pa.schema({"step": pa.int32(), "what": pa.string(), "start_s": _S, "end_s": _S})

SCHEMAS = {"trajectories": TRAJECTORIES, "tokens": TOKENS, "timeline": TIMELINE, "waiting": TRAJECTORIES}

# What older files of this version lack: columns, and fields of the structs in a column.
ADDED = {"evidence": pa.string(), "agent": pa.string(), "row": pa.int32()}
ADDED_WITHIN = {"turns": ("parent", "row", "fork"), "version_spans": ("row",)}
