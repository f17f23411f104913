"""An episode as verl's agent loops give it: `to_outputs`, and `of_outputs` for the loops of other projects."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_ext.episode import SUMMARY, Episode, EpisodeKey, Reward, ToolUse, from_row, summary_of


@dataclass
class ForeignEpisode(Episode):
    """An episode of another project's loop, which may fill in columns that this project knows nothing of."""

    outputs: list[AgentLoopOutput] = field(default_factory=list)


def of_outputs(key: EpisodeKey, outputs: Sequence[AgentLoopOutput]) -> Episode:
    """Return what another project's loop gave as an episode, which `to_outputs` gives back."""
    final = outputs[-1]
    episode = vars(from_row(key, final.extra_fields, final.reward_score))
    rows = []
    for each in outputs:
        tokens = {"prompt_ids": each.prompt_ids, "ids": each.response_ids, "mask": each.response_mask}
        rows.append(replace(from_row(key, each.extra_fields).row, **tokens))
    if final.reward_score is not None and not episode["reward"]:
        episode["reward"] = Reward(final.reward_score)
    episode |= {"rows": rows, "score_s": final.metrics.compute_score}
    return ForeignEpisode(**episode, outputs=list(outputs))


def to_outputs(episode: Episode) -> list[AgentLoopOutput]:
    """Return an episode as verl's outputs, one for each of its rows; all of them have its reward."""
    outputs = episode.outputs if isinstance(episode, ForeignEpisode) else [*_outputs(episode)]
    for output in outputs:
        output.metrics.compute_score, output.reward_score = episode.score_s, None
        if episode.reward is not None:
            output.reward_score = episode.reward.score
            output.extra_fields["reward_extra_info"] = dict(episode.reward.info)
    return outputs


def _outputs(episode: Episode) -> Iterator[AgentLoopOutput]:
    summary, use = summary_of(episode), episode.use or ToolUse()
    for row in episode.rows:
        versions = [version for *_, version in row.version_spans if version is not None]
        yield AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.ids,
            response_mask=row.mask,
            response_logprobs=row.log_probs,
            multi_modal_data={},
            num_turns=row.num_turns,
            metrics=AgentLoopMetrics(generate_sequences=use.generate_s, tool_calls=use.tool_s),
            extra_fields={
                **episode.from_server,
                "min_global_steps": min(versions, default=None),
                "max_global_steps": max(versions, default=None),
                SUMMARY: summary,
            },
        )
