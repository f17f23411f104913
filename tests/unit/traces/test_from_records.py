"""A rollout's record is a trace, of which SFT makes the rollout's own tokens and mask."""

import json
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.unit.protocols.test_hermes import call_text
from verl_ext.environments import by_name
from verl_ext.environments.base import Environment, tool
from verl_ext.episode import AgentUse, Episode, EpisodeKey, Reward
from verl_ext.records import store
from verl_ext.records.trajectories import problem_columns, to_record
from verl_ext.traces.from_records import read_run
from verl_ext.traces.output import row_of, write_kept
from verl_ext.traces.trace import Reason, Trace

RECORDER = {"enable": True, "token_share": 0.0, "keep_steps": 1, "max_gb": 1}
ROW = {"uid": "prompt-0", "global_steps": 3, "data_source": "own", "ability": "math"}
ROW |= {"raw_prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}
RIGHT = Reward(1.0, {"acc": 1.0, "pred": "2", "verdict": "correct", "method": "integer"})


class Asker(Environment):
    """A user who asks twice."""

    def __init__(self, config: Any = None):
        super().__init__(config)
        self.left = ["And <|im_end|> 2+2?", "Thanks. 3+3?"]

    async def reply(self, text: str) -> list[dict] | None:
        return [{"role": "user", "content": self.left.pop(0)}] if self.left else None


class Shop(Asker):
    """Also has a tool with several arguments, and a system prompt."""

    async def open(self, task: Any) -> Any:
        opening = await super().open(task)
        return type(opening)([{"role": "system", "content": "Be brief."}, *opening.messages], opening.tools)

    @tool
    def price(self, thing: str, exact: bool = False) -> str:
        """Look a price up.

        Args:
            thing: what to buy.
            exact: with the cents.
        """
        return f"{thing}: 3</tool_response> \u20ac"


def write(run, episode: Episode, **columns: Any) -> None:
    row = problem_columns(ROW | columns, validate=False) | to_record(episode)
    store.write(store.path_of(run, "trajectories", 3), "trajectories", [row])


def sft_tokens(trace: Trace, tokenizer: Any, protocol: str, folder: Any) -> tuple[list[int], list[int]]:
    from verl_ext.datasets.sft import RetoolSFTDataset

    write_kept([row_of(trace)], folder / "kept.parquet", {})
    config = {"messages_key": "messages", "max_length": 4000, "truncation": "error"}
    config["retool"] = {"protocol": protocol, "bad_rows": "error"}
    (item,) = RetoolSFTDataset(str(folder / "kept.parquet"), tokenizer, OmegaConf.create(config))
    return item["input_ids"].tolist(), item["loss_mask"].tolist()


CODE = ["Let me see. <code>print(1+1)</code>", "<code>\nx = 2\nprint(x)\n</code>", "So \\boxed{2}"]
HERMES = [
    "I look. " + call_text(code="print(1+1)"),
    '<tool_call>{"name":"code_interpreter", "arguments":',
    "\\boxed{2}",
]
HERMES[1] += '{"code":"print(2)"}}</tool_call>  '  # not as `json.dumps`
SHOP = [
    "I ask for both. " + "\n".join(call_text("price", thing=thing, exact=True) for thing in ("tea", "caf\u00e9")),
    "\\boxed{2}",
    call_text("price", thing="milk"),
    "Then \\boxed{4}",
    "\\boxed{6}",
]
CASES = {
    "code": ("code", CODE, {}),
    "code, notebook": ("code", CODE, {"environment": "notebook"}),
    "hermes": ("hermes", HERMES, {}),
    "code, user": ("code", ["\\boxed{2}", CODE[1], "\\boxed{4}", "\\boxed{6}"], {"environment": ["python", "x:Asker"]}),
    "hermes, own tools and a user": ("hermes", SHOP, {"environment": "x:Shop", "max_parallel_calls": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_sft_makes_the_tokens_of_the_rollout(name, roll_out, qwen_tokenizer, tmp_path, monkeypatch):
    protocol, texts, settings = CASES[name]
    monkeypatch.setattr(by_name, "load_object", lambda where: {"Asker": Asker, "Shop": Shop}[where.rpartition(":")[2]])
    turns = [qwen_tokenizer.encode(text, add_special_tokens=False) for text in texts]
    ends = [] if protocol == "hermes" else [i for i, text in enumerate(texts) if "</code>" in text]
    turns = [ids if i in ends else [*ids, qwen_tokenizer.eos_token_id] for i, ids in enumerate(turns)]
    settings = {"response_length": 2000, "max_tool_response_tokens": 40, "max_tool_calls": 9} | settings
    outputs = ["7" * 300, "1 \ud800 <|im_end|></interpreter>"]
    episode, *_ = roll_out(qwen_tokenizer, turns, outputs, protocol=protocol, recorder=RECORDER, **settings)
    assert episode.finish_reason == "answer" and len(episode.turns) == len(texts)
    write(tmp_path, episode)
    (trace,) = read_run(tmp_path)
    assert isinstance(trace, Trace), trace
    row = episode.row
    ids, mask = sft_tokens(trace, qwen_tokenizer, protocol, tmp_path)
    assert qwen_tokenizer.decode(ids) == qwen_tokenizer.decode(row.prompt_ids + row.ids)
    assert ids == row.prompt_ids + row.ids
    assert mask == [0] * len(row.prompt_ids) + row.mask


def test_a_trace_has_what_environment_and_verifier_read(roll_out, tokenizer, encode, tmp_path):
    answer = [*encode("\\boxed{2}"), tokenizer.eos_token_id]
    episode, *_ = roll_out(tokenizer, [answer], recorder=RECORDER)
    episode.reward = RIGHT
    info = {"setup_code": "x = 1", "index": 4}
    write(tmp_path, episode, extra_info=info, reward_model={"ground_truth": ["2"]})
    (trace,) = read_run(tmp_path)
    assert (trace.gold, trace.task["extra_info"], trace.task["data_source"]) == (["2"], info, "own")
    assert (trace.score.acc, trace.score.pred, trace.score.method) == (1.0, "2", "integer")
    assert trace.problem == "1+1?" and trace.about["step"] == 3 and trace.about["sampling"]["temperature"] == 1.0
    kept = row_of(trace)
    assert json.loads(kept["about"])["ground_truth"] == ["2"] and kept["ground_truth"] == '["2"]'


def test_a_response_without_an_answer_is_no_trace(roll_out, tokenizer, encode, tmp_path):
    answer = [*encode("\\boxed{2}"), tokenizer.eos_token_id]
    cut, *_ = roll_out(tokenizer, [answer], response_length=2, recorder=RECORDER)
    write(tmp_path / "cut", cut)
    ((name, _, why),) = read_run(tmp_path / "cut")
    assert name == "prompt-0_0 of step 3" and "max_tokens" in why.detail and why.reason == Reason.NOT_A_TRACE
    refused, *_ = roll_out(tokenizer, [encode("<code></code>"), answer], response_length=200, recorder=RECORDER)
    write(tmp_path / "refused", refused)
    ((_, _, why),) = read_run(tmp_path / "refused")
    assert why.detail == "it has a call that could not be run (malformed:empty_code)"
    unrecorded, *_ = roll_out(tokenizer, [answer])
    write(tmp_path / "other", unrecorded)
    ((_, _, why),) = read_run(tmp_path / "other")
    assert "what its prompt was made of" in why.detail
    of_agent, *_ = roll_out(tokenizer, [answer], recorder=RECORDER)
    of_agent.agent = AgentUse(requests=1)
    write(tmp_path / "agent", of_agent)
    ((_, _, why),) = read_run(tmp_path / "agent")
    assert why.reason == Reason.NOT_A_TRACE and "do not have the agent's messages" in why.detail


def test_what_the_infrastructure_ended_is_neither_trace_nor_left_out(tmp_path):
    for number, reason in enumerate(("sandbox_failure", "aborted", "raised")):
        write(tmp_path / str(number), Episode(EpisodeKey("prompt-0", 0), finish_reason=reason, exception="down"))
        assert list(read_run(tmp_path / str(number))) == []
