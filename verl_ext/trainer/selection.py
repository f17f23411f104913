"""What the sampler tells the trainer: `Selection` of each batch, `StepEnds` of each step."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_ext.episode import EpisodeKey
from verl_ext.outcome import PromptEnd
from verl_ext.trainer.exclusions import Ended


@dataclass(frozen=True)
class Selection:
    """What a batch has of the groups that it took. Of verl's own samplers: all of them, with nothing left out.

    Attributes:
        fillers: uids of groups that are not useful, and complete the batch; their advantages are set to 0.
        baseline_only: episodes and copies that are in the baseline of their group, but not in the loss.
        left_out: episode of these groups -> why it is not in the loss.
        has_several_rows: whether an episode of the batch has, so that groups differ in their number of rows.
    """

    fillers: frozenset[str] = frozenset()
    baseline_only: frozenset[EpisodeKey] = frozenset()
    left_out: Mapping[EpisodeKey, str] = field(default_factory=dict)
    has_several_rows: bool = False

    def trains(self, key: EpisodeKey) -> bool:
        """Tell whether a row of the batch is in the loss."""
        return key.uid not in self.fillers and key.episode not in self.baseline_only


@dataclass(frozen=True)
class StepEnds:
    """What ended in a step.

    Attributes:
        ended: counts of the rollouts that ended.
        prompts: uid -> what became of the prompts that were decided.
        waiting: uids of the groups that ended and are still in the queue.
        fates: uid of a decided prompt -> `RolloutFate` with its reason -> number of rollouts. A prompt of which a
            rollout raised has none.
    """

    ended: Ended = field(default_factory=Ended)
    prompts: Mapping[str, PromptEnd] = field(default_factory=dict)
    waiting: frozenset[str] = frozenset()
    fates: Mapping[str, Counter[str]] = field(default_factory=dict)
