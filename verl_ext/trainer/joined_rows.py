"""The rows of an episode as one sequence, for what is computed of whole episodes: baselines, weights of responses.

A conversation that branches gives an episode several rows (`Episode.rows`). Each sampled token trains in one of them,
so that its rows, one after the other, hold the episode's tokens once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_ext.episode import EpisodeKey


class JoinedRows:
    """The rows of a batch, [B, T], by episode, [E, W]: row after row, in the order in which the batch has the episodes.

    Args:
        keys: of each row. Rows of equal keys, as an original's and its copy's, are one: the first is what is joined.
        held: [B, T] each; a row ends where all of them are 0 from there on. Read only if an episode has several rows.
    Attributes:
        are_several: whether an episode has.
        last: last row of each episode.
    """

    def __init__(self, keys: Sequence[EpisodeKey], *held: Tensor):
        rows: dict[EpisodeKey, dict[int, int]] = {}  # episode -> number of a row -> its place in the batch
        for place, key in enumerate(keys):
            rows.setdefault(key.episode, {}).setdefault(key.row, place)
        self.last = [own[max(own)] for own in rows.values()]
        self.are_several = any(len(own) > 1 for own in rows.values())
        number = {episode: i for i, episode in enumerate(rows)}
        self._episodes = [number[key.episode] for key in keys]
        if not self.are_several:
            return
        held_tokens = torch.stack([each != 0 for each in held]).any(0)
        places = torch.arange(1, held_tokens.shape[-1] + 1, device=held_tokens.device)
        self._ends, self._width = (held_tokens * places).amax(-1).tolist(), held_tokens.shape[-1]
        starts, self._joined_width = [0] * len(keys), 0
        for own in rows.values():
            at = 0
            for _, place in sorted(own.items()):
                starts[place], at = at, at + self._ends[place]
            self._joined_width = max(self._joined_width, at)
        first = [rows[key.episode][key.row] for key in keys]
        self._starts = [starts[place] for place in first]
        self._joined = [place for place, original in enumerate(first) if place == original]

    def join(self, values: Tensor) -> Tensor:
        """Return the values of rows, [B, T], as those of episodes, [E, W]; 0 behind an episode's end."""
        if not self.are_several:
            return values[self.last]
        result = values.new_zeros(len(self.last), self._joined_width)
        for place in self._joined:
            start, length = self._starts[place], self._ends[place]
            result[self._episodes[place], start : start + length] = values[place, :length]
        return result

    def split(self, values: Tensor) -> Tensor:
        """Return the values of episodes, [E, W], as those of rows, [B, T]; 0 behind a row's end."""
        if not self.are_several:
            return values[self._episodes]
        result = values.new_zeros(len(self._episodes), self._width)
        for place, (episode, start, length) in enumerate(zip(self._episodes, self._starts, self._ends, strict=True)):
            result[place, :length] = values[episode, start : start + length]
        return result
