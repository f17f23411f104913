"""An episode as outputs of verl's agent loops, and the outputs of other projects' loops as an episode."""

from dataclasses import replace

import pytest

from verl_ext.episode import SUMMARY, Episode, EpisodeKey, Reward, TokenRow, ToolUse, from_row

KEY = EpisodeKey("u", 3)
FIRST = TokenRow([1, 2], [3, 4, 5], [1, 0, 1], [-0.5, 0.0, -0.25], [(0, 1), (2, 3)], [(0, 1, 6), (2, 3, 7)])
LAST = TokenRow([1, 2, 9], [6], [1], None, [(0, 1)], [(0, 1, None)])


def episode(**changes):
    use = ToolUse(ok=1, generate_s=1.5, tool_s=0.5)
    made = {"finish_reason": "answer", "use": use, "from_server": {"num_preempted": 2}, "score_s": 0.25}
    return Episode(KEY, [FIRST, LAST], **made | changes)


def foreign_outputs(number=2, **fields):
    """What another project's loop gives: tokens 7, of which the model wrote the last ones."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    extra_fields = {"model_spans": [(1, 2)], "finish_reason": "stop", "own": "column"}
    return [
        AgentLoopOutput(
            prompt_ids=[i],
            response_ids=[7, 7],
            response_mask=[0, 1],
            metrics=AgentLoopMetrics(generate_sequences=3.0, compute_score=0.5),
            extra_fields=dict(extra_fields) | {"number": i},
            **fields,
        )
        for i in range(number)
    ]


def test_every_row_is_an_output_with_the_reward_and_the_summary_of_its_episode(cpu_platform):
    from verl_ext.rollout.rows import to_outputs

    info = {"acc": 1.0, "pred": "7"}
    first, last = to_outputs(episode(reward=Reward(0.5, info)))
    assert (first.prompt_ids, first.response_ids, first.response_mask) == ([1, 2], [3, 4, 5], [1, 0, 1])
    assert (last.prompt_ids, last.response_ids, last.response_mask) == ([1, 2, 9], [6], [1])
    assert first.response_logprobs == [-0.5, 0.0, -0.25] and last.response_logprobs is None
    assert (first.num_turns, last.num_turns) == (4, 2)
    versions = [[each.extra_fields[f"{end}_global_steps"] for end in ("min", "max")] for each in (first, last)]
    assert versions == [[6, 7], [None, None]]
    for output in (first, last):
        assert output.reward_score == 0.5 and output.extra_fields["reward_extra_info"] == info
        assert output.extra_fields["num_preempted"] == 2
        metrics = output.metrics
        assert (metrics.generate_sequences, metrics.tool_calls, metrics.compute_score) == (1.5, 0.5, 0.25)
        read = from_row(KEY, output.extra_fields, output.reward_score)
        assert [row.model_spans for row in read.rows] == [[(0, 1), (2, 3)], [(0, 1)]] and read.use.ok == 1


def test_an_episode_that_is_not_scored_has_no_reward(cpu_platform):
    from verl_ext.rollout.rows import to_outputs

    for output in to_outputs(episode()):
        assert output.reward_score is None and "reward_extra_info" not in output.extra_fields


def test_what_another_projects_loop_gave_is_given_back_with_the_reward_in_every_row(cpu_platform):
    from verl_ext.rollout.rows import of_outputs, to_outputs

    given = foreign_outputs()
    found = of_outputs(KEY, given)
    assert (found.key, found.finish_reason, found.use, found.reward) == (KEY, "stop", None, None)
    assert [(row.prompt_ids, row.ids, row.mask) for row in found.rows] == [([0], [7, 7], [0, 1]), ([1], [7, 7], [0, 1])]
    found.reward, found.score_s = Reward(1.0, {"acc": 1.0}), 2.0
    back = to_outputs(found)
    assert [output is before for output, before in zip(back, given, strict=True)] == [True, True]
    for number, output in enumerate(back):
        assert (output.reward_score, output.extra_fields["reward_extra_info"]) == (1.0, {"acc": 1.0})
        assert output.extra_fields["own"] == "column" and output.extra_fields["number"] == number
        assert SUMMARY not in output.extra_fields
        assert (output.metrics.generate_sequences, output.metrics.compute_score) == (3.0, 2.0)


def test_the_spans_of_another_projects_loop_are_those_that_are_scored(cpu_platform):
    """What its tools wrote cannot answer for the model."""
    from verl_ext.rollout.rows import of_outputs

    first, last = foreign_outputs()
    first.extra_fields["model_spans"], last.extra_fields["model_spans"] = None, [(0, 1), (1, 2)]
    assert [row.model_spans for row in of_outputs(KEY, [first, last]).rows] == [[], [(0, 1), (1, 2)]]


def test_a_loop_that_passes_on_what_ours_gave_keeps_its_counts(cpu_platform):
    from verl_ext.rollout.rows import of_outputs, to_outputs

    found = of_outputs(KEY, to_outputs(replace(episode(), rows=[FIRST])))
    assert found.use.ok == 1 and found.rows == [replace(FIRST, log_probs=[])] and found.finish_reason == "answer"


def test_a_loop_that_scores_has_its_reward_and_its_seconds(cpu_platform):
    from verl_ext.rollout.rows import of_outputs

    given = foreign_outputs(reward_score=0.25)
    assert (of_outputs(KEY, given).reward, of_outputs(KEY, given).score_s) == (Reward(0.25), 0.5)
    given[-1].extra_fields["reward_extra_info"] = {"acc": 0.5}
    assert of_outputs(KEY, given).reward == Reward(0.25, {"acc": 0.5})


@pytest.mark.parametrize("is_foreign", [False, True])
def test_an_episode_that_is_to_be_scored_again_has_no_reward(cpu_platform, is_foreign):
    """verl's workers score no output that has a reward (experimental/agent_loop/agent_loop.py:972, 0.9.1)."""
    from verl_ext.rollout.rows import of_outputs, to_outputs

    made = of_outputs(KEY, foreign_outputs()) if is_foreign else episode()
    made.reward = Reward(0.0, {"acc": 0.0, "unverified": 1.0})
    assert {output.reward_score for output in to_outputs(made)} == {0.0}
    made.reward = None
    assert {output.reward_score for output in to_outputs(made)} == {None}
