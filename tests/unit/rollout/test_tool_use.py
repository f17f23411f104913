import pytest

from verl_ext.episode import AgentUse, Episode, EpisodeKey, Reward, TokenRow, ToolUse
from verl_ext.protocols.base import Call
from verl_ext.rollout.response import Rollout
from verl_ext.rollout.tool_use import agent_metrics, tool_metrics


def test_a_failed_or_malformed_call_is_fixed_by_the_next_one_that_ends_well():
    rollout, call = Rollout(EpisodeKey("u", 0), [], limit=9), Call("code_interpreter", {"code": "x\n\n y"}, 0)
    for error in ("NameError", "NameError", None, None):  # the second error was not fixed by the first repair
        rollout.counts.add(call, error)
    rollout.counts.pass_malformed()
    for _ in range(2):  # the second came before a malformed one
        rollout.counts.add(call, None)
    rollout.counts.pass_malformed()
    use = rollout.use
    assert (use.ok, use.fixed, use.calls, use.failed) == (4, 2, 6, 2)
    rollout.counts.add(Call("price_of", {"item": "pen"}, 0), "KeyError")
    assert use.errors == {"NameError": 2, "KeyError": 1} and use.code_lines == 6 * 2
    assert use.tools == {"code_interpreter": [4, 2], "price_of": [0, 1]}


def rollout(acc, spans, finish_reason="answer", **use):
    row, reward = TokenRow(model_spans=spans), Reward(None, {"acc": acc})
    return Episode(EpisodeKey("u", 0), rows=[row], finish_reason=finish_reason, use=ToolUse(**use), reward=reward)


def test_tool_metrics_by_hand():
    metrics = tool_metrics(
        [
            # 100 tokens: 20 of the model, 10 of the tool, 70 of the model
            rollout(1.0, [(0, 20), (30, 100)], ok=2, code_lines=6, first_call_token=10, tool_s=1.0, generate_s=4.0),
            rollout(
                0.0,
                [(0, 40)],
                "max_tokens",
                ok=1,
                errors={"NameError": 2, "timeout": 1},
                malformed={"bad_json": 2},
                fixed=1,
                code_lines=4,
                first_call_token=30,
                tool_s=2.0,
                queue_s=0.6,
                run_s=1.2,
                generate_s=3.0,
                void_turns=2,
                outputs_cut=1,
            ),
            rollout(0.0, [(0, 10)], "max_turns"),
        ]
    )
    expected = {
        "tool/code_ratio": 2 / 3,
        "tool/calls": 6 / 3,
        "tool/code_lines": 10 / 6,
        "tool/ok_rate": 3 / 6,
        "tool/ok_rate/right": 2 / 2,
        "tool/ok_rate/wrong": 1 / 4,
        "tool/error_rate": 3 / 6,
        "tool/timeout_rate": 1 / 6,
        "tool/error/NameError": 2 / 6,
        "tool/error/timeout": 1 / 6,
        "tool/malformed_rate": 2 / 8,
        "tool/malformed/bad_json": 2 / 3,  # a rollout
        "tool/fixed_rate": 1 / 5,
        "tool/first_call_position": (10 / 100 + 30 / 40) / 2,
        "tool/outputs_cut": 1 / 6,
        "tool/time_share": 3 / 10,
        "tool/seconds": 3 / 6,
        "tool/queue_s": 0.6 / 6,
        "tool/run_s": 1.2 / 6,
        "turn/model_tokens": (20 + 70 + 40 + 10) / 4,
        "turn/tool_tokens": 10.0,
        "turn/void_rate": 1 / 3,
        "finish/answer": 1 / 3,
        "finish/token_limit": 1 / 3,
        "finish/turn_limit": 1 / 3,
        "finish/malformed_limit": 0.0,
        "finish/timeout": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    ends = {"answer", "turn_limit", "token_limit", "malformed_limit", "timeout", "agent_error"}
    ends |= {"sandbox_failure", "verifier_unknown", "aborted"}
    assert {name for name in metrics if name.startswith("finish/")} == {f"finish/{end}" for end in ends}


def test_each_tool_has_its_calls_and_failures():
    both = rollout(1.0, [(0, 9)], ok=3, errors={"KeyError": 1}, tools={"price_of": [1, 1], "code_interpreter": [2, 0]})
    metrics = tool_metrics([both, rollout(0.0, [(0, 9)], ok=1, tools={"price_of": [1, 0]}), rollout(0.0, [(0, 9)])])
    assert metrics["tool/calls/price_of"] == 3 / 3 and metrics["tool/error_rate/price_of"] == 1 / 3
    assert metrics["tool/calls/code_interpreter"] == 2 / 3 and metrics["tool/error_rate/code_interpreter"] == 0.0
    assert metrics["tool/calls"] == pytest.approx(3 / 3 + 2 / 3)


def test_no_call_at_all_gives_zeros_and_no_rollout_nothing():
    assert tool_metrics([]) == {}
    metrics = tool_metrics([rollout(1.0, [(0, 5)])])
    assert metrics["tool/ok_rate"] == metrics["tool/error_rate"] == metrics["tool/first_call_position"] == 0.0


def test_verl_averages_every_metric_over_the_batches_of_a_step():
    """Its aggregator takes the largest of what has "max" in its name, the smallest with "min", the sum with "total"."""
    from verl.trainer.ppo.v1.utils import MetricsAggregator

    metrics = tool_metrics([rollout(1.0, [(0, 5)], errors={"NameError": 1}, malformed={"bad_json": 1})])
    aggregator = MetricsAggregator()
    for scale in (1.0, 3.0):
        aggregator.add_step_metrics(dict.fromkeys(metrics, scale), sample_count=1)
    assert set(aggregator.get_aggregated_metrics().values()) == {2.0}


def test_agent_metrics_are_means_over_the_episodes_of_agents():
    uses = [
        AgentUse(requests=5, turns=4, forks={"history": 2}, agent_s=1.5),
        AgentUse(turns=1, forks={"tools": 1}),
        None,
    ]
    found = agent_metrics([Episode(EpisodeKey("u", i), agent=use) for i, use in enumerate(uses)])
    assert {name: value for name, value in found.items() if value} == {
        "agent/requests": 2.5,
        "agent/turns": 2.5,
        "agent/agent_s": 0.75,
        "agent/forks": 1.5,
        "agent/forks/history": 1.0,
        "agent/forks/tools": 0.5,
    }
    assert len(found) == 11 + 1 + 2 and agent_metrics([Episode(EpisodeKey("u", 0))]) == {}
