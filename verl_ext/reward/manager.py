"""The verl reward manager: it turns a verifier's verdict into the reward of one rollout, and reports what it did.

In a YAML (the settings under `reward_kwargs` are those of `RewardOptions`):

    reward:
      reward_manager: {source: importlib, name: RetoolRewardManager, module: {path: pkg://verl_ext.reward.manager}}
      reward_kwargs: {max_resp_len: 16384, overlong_buffer_cfg: {enable: true, len: 4096}}

It is also registered as "retool", for processes that have imported this module. Written for verl 0.9.1.
"""

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from verl_ext.episode import Episode, EpisodeKey, Reward, ToolUse, from_row
from verl_ext.objectives.shaping import PIECEWISE, overlong_penalty, piecewise_length_penalty, tool_bonus
from verl_ext.outcome import UNVERIFIED, RolloutEnd, infrastructure_failure
from verl_ext.records.problem import id_of, problem_of
from verl_ext.reward.numbers import BrokenReward
from verl_ext.reward.score import Score
from verl_ext.reward.verifiers import RAISED_BY_TEXT, Verifiers, problem_text, verify_response
from verl_ext.runs import jsonl

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardOptions:
    """The settings under `reward.reward_kwargs`; the first three names are those of verl's DAPO manager.

    The plain reward is +1 for a right answer and -1 otherwise (2 acc - 1 if a verifier gives a share). DAPO adds the
    overlong penalty to it, so that the sum lies in [-2, 1]: a wrong answer that is too long is worse than another.

    Attributes:
        max_resp_len: tokens, L_max of DAPO's Eq. 13; None takes `data.max_response_length`.
        overlong_buffer: tokens, L_cache of Eq. 13 (`overlong_buffer_cfg.len`); None turns the penalty off.
        overlong_factor: weight of the penalty (`overlong_buffer_cfg.penalty_factor`).
        overlong_counts: "response" counts all response tokens, as DAPO does; "model" leaves tool output out. It holds
            for both length penalties.
        length_penalty: points (tokens, penalty) of `shaping.piecewise_length_penalty`; in a YAML "piecewise" stands for
            its default ones. None adds no penalty.
        tool_bonus: the published run's, not the paper's: a wrong answer gets 0.1 per tool call, up to -0.6 in all.
        reward_floor: the reward is never below this; None (DAPO) sets no floor.
        random_reward_p: control experiment. The trained reward is +1 with this probability whatever the response,
            drawn by a hash of the sample; `acc` stays the truth. A policy must not improve with it.
        random_reward_seed: another seed draws other random rewards.
        unverified_dir: folder for responses that could not be verified, to be graded again; None keeps none.
        verifiers: pattern of `data_source` or `ability` -> verifier; see verifiers/__init__.py.
    """

    max_resp_len: int
    overlong_buffer: int | None = None
    overlong_factor: float = 1.0
    overlong_counts: str = "response"
    length_penalty: Sequence[tuple[float, float]] | None = None
    tool_bonus: bool = False
    reward_floor: float | None = None
    random_reward_p: float | None = None
    random_reward_seed: int = 0
    unverified_dir: str | None = None
    verifiers: Mapping[str, Any] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "RewardOptions":
        """Read `reward.reward_kwargs` of a whole verl config.

        Raises:
            ValueError: a key means nothing here (Hydra would accept it silently), or a value is out of range.
        """
        settings = dict(config["reward"].get("reward_kwargs") or {})
        buffer_cfg = dict(settings.pop("overlong_buffer_cfg", None) or {})
        known = {field.name for field in fields(cls)} - {"overlong_buffer", "overlong_factor"}
        # `log` is verl's: here the penalty is always logged, as reward_overlong.
        unknown_cfg = buffer_cfg.keys() - {"enable", "len", "penalty_factor", "log"}
        if unknown := settings.keys() - known | {f"overlong_buffer_cfg.{key}" for key in unknown_cfg}:
            raise ValueError(
                f"Unknown settings under reward.reward_kwargs: {', '.join(sorted(unknown))}. Expected some of "
                f"{', '.join(sorted(known))}, overlong_buffer_cfg.{{enable,len,penalty_factor,log}}."
            )
        if settings.get("max_resp_len") is None:
            settings["max_resp_len"] = config["data"]["max_response_length"]
        if buffer_cfg.get("enable", False):
            buffer, max_length = buffer_cfg.get("len") or 0, settings["max_resp_len"]
            overlong_penalty(torch.tensor([0]), max_length=max_length, buffer=buffer)  # raises here, at start-up
            settings |= {"overlong_buffer": buffer, "overlong_factor": buffer_cfg.get("penalty_factor", 1.0)}
        points = settings.get("length_penalty")
        if isinstance(points, str) and points != "piecewise":
            raise ValueError(
                f"length_penalty is {points!r}: expected 'piecewise', [[tokens, penalty], ...], or null for none."
            )
        if points is not None:
            settings["length_penalty"] = PIECEWISE if points == "piecewise" else tuple(map(tuple, points))
            piecewise_length_penalty(torch.tensor([0]), settings["length_penalty"])  # raises here, at start-up
        options = cls(**settings)
        if options.overlong_counts not in ("response", "model"):
            raise ValueError(f"overlong_counts is {options.overlong_counts!r}: expected 'response' or 'model'.")
        if options.random_reward_p is not None and not 0.0 <= options.random_reward_p <= 1.0:
            raise ValueError(f"random_reward_p is {options.random_reward_p}: expected a probability, or null.")
        return options


@register("retool")
class RetoolRewardManager(RewardManagerBase):
    """+1/-1 on the answer in the model's own tokens, with length penalties, a tool bonus and a control as options.

    A sample that the infrastructure failed (`finish_reason` "sandbox_failure" or "aborted", or an answer
    that could not be verified, for which its own text is never the reason) is not scored as wrong: it gets the reward
    0.0, halfway between right and wrong, and the flag `sandbox_failure` or `unverified` or the finish reason. By these,
    the sampler keeps it out of training (verl_ext/trainer/sampler.py), and the figures of a validation
    (verl_ext/trainer/failed_samples.py) and of a dump (verl_ext/evaluation/figures.py) leave it out. A broken row or
    verifier stops the run: a row without a ground truth, an `acc` of NaN.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ):
        """Take verl's arguments; `compute_score` and those of the reward model are not used.

        Raises:
            ValueError: `reward.reward_kwargs` has an unknown or impossible setting, or a custom reward function is
                configured, which this manager would ignore.
        """
        super().__init__(config, tokenizer, compute_score)
        custom = (config["reward"].get("custom_reward_function") or {}).get("path")
        if custom:
            raise ValueError(
                f"reward.custom_reward_function.path is {custom!r}, but RetoolRewardManager scores with "
                "the verifiers of verl_ext.reward only. Remove the path and name your verifier under "
                "reward.reward_kwargs.verifiers, or take verl's manager: reward.reward_manager.source=register and "
                "reward.reward_manager.name=naive."
            )
        self.options = RewardOptions.from_config(config)
        self.verifiers = Verifiers(config, self.options.verifiers)
        self.num_scored = 0
        self.num_unverified = 0

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score one rollout for verl, the last one of several outputs. See `score_episode`."""
        item = data[-1:][0]
        sample, responses, mask = item.non_tensor_batch, item.batch["responses"], item.batch["attention_mask"]
        num_tokens = int(mask[len(mask) - len(responses) :].sum())
        key = EpisodeKey(str(sample.get("uid", "")), int(sample.get("session_id", 0)))
        episode = from_row(key, sample.get("tool_extra_fields") or {})
        episode.row.ids = responses[:num_tokens].tolist()
        reward = await self.score_episode(episode, sample)
        return {"reward_score": reward.score, "reward_extra_info": dict(reward.info)}

    async def score_episode(self, episode: Episode, sample: Mapping[str, Any]) -> Reward:
        """Score one episode. A verifier may take seconds; the event loop keeps running meanwhile.

        Args:
            episode: its last row is scored; without spans, all of the row counts as the model's.
            sample: `reward_model.ground_truth`, `data_source`.
        Returns:
            The reward, with the same names for every sample: `acc` (the truth, in [0, 1]; 0 when unverified),
            `train_acc` (which the reward was made of), the parts of the reward `reward_base`, `reward_overlong`,
            `reward_length` and `reward_tool_bonus`, `unverified`, `sandbox_failure`, `response_tokens` and the loop's
            counts as floats; `pred`, `verdict`, `method`, `data_source`, `id` (of `extra_info`), `problem`
            (records/problem.py), `finish_reason`, `normalised` as strings, "" for nothing.
        Raises:
            BrokenReward: the row or its verifier is broken; the message names both. The run stops.
            RuntimeError: the verifier could not reach a worker or a server, and did not say "unknown".
        """
        options, token_ids, use = self.options, episode.row.ids, episode.use or ToolUse()
        spans = episode.row.model_spans or [(0, len(token_ids))]
        finish_reason = str(episode.finish_reason)

        response = await asyncio.to_thread(self._decode, token_ids, spans)
        score = episode.score or await self._verify(response, sample)
        flags = {
            UNVERIFIED: float(score.is_unverified),
            "sandbox_failure": float(finish_reason == RolloutEnd.SANDBOX_FAILURE),
        }
        infrastructure_failed = infrastructure_failure(flags | {"finish_reason": finish_reason}) is not None
        self._count(score, response, sample)
        num_model_tokens = sum(end - start for start, end in spans)

        acc = train_acc = score.acc or 0.0
        if options.random_reward_p is not None:
            train_acc = float(self._draw(sample, token_ids) < options.random_reward_p)
        if infrastructure_failed:
            train_acc = 0.5
        parts = dict.fromkeys(("reward_base", "reward_overlong", "reward_length", "reward_tool_bonus"), 0.0)
        parts["reward_base"] = 2.0 * train_acc - 1.0
        if not infrastructure_failed:
            parts |= self._shape(num_model_tokens if options.overlong_counts == "model" else len(token_ids))
            if options.tool_bonus and train_acc == 0.0:
                parts["reward_tool_bonus"] = tool_bonus(torch.tensor([use.calls])).item()
        reward = sum(parts.values())
        if options.reward_floor is not None:
            reward = max(reward, options.reward_floor)
        counts = {
            "response_tokens": num_model_tokens,
            "tool_calls": use.calls,
            "tool_errors": use.failed,
            "tool_timeouts": use.errors.get("timeout", 0),
            "model_turns": len(episode.row.model_spans),
            "truncated": episode.is_truncated,
        }
        info = {
            "acc": acc,
            "train_acc": train_acc,
            **parts,
            **flags,
            **{name: float(number) for name, number in counts.items()},
            "pred": score.pred,
            "verdict": score.verdict,
            "method": score.method,
            "normalised": score.normalised,
            "data_source": str(sample.get("data_source", "")),
            "id": id_of(sample),
            "problem": problem_of(sample),
            "finish_reason": finish_reason,
        }
        return Reward(reward, info)

    def _decode(self, token_ids: list[int], spans: list[tuple[int, int]]) -> str:
        """Decode what the model itself sampled, without the tools' output, which cannot answer for it."""
        outside = [span for span in spans if not 0 <= span[0] <= span[1] <= len(token_ids)]
        if outside:
            raise BrokenReward(
                f"model_spans contains {outside[0]} in a response of {len(token_ids)} tokens: expected pairs "
                "0 <= start <= end <= length. The agent loop must give indices into response_ids."
            )
        return "\n".join(self.tokenizer.decode(token_ids[start:end], skip_special_tokens=True) for start, end in spans)

    async def _verify(self, response: str, sample: Mapping[str, Any]) -> Score:
        data_source = str(sample.get("data_source", ""))
        row = f"row {sample.get('index')} of data_source {data_source!r}"
        ground_truth = (sample.get("reward_model") or {}).get("ground_truth")
        if ground_truth is None:
            raise BrokenReward(
                f"{row} has no reward_model.ground_truth: expected the answer to compare with. "
                "Correct the data file: without a ground truth, no answer can be scored."
            )
        verifier = self.verifiers.find(data_source, str(sample.get("ability", "")))
        try:
            return await verify_response(verifier, response, ground_truth, sample)
        except ValueError as error:
            raise BrokenReward(f"{row} cannot be scored: {error}") from error
        except RAISED_BY_TEXT as error:  # on a plain response as well
            raise BrokenReward(f"{type(verifier).__name__} failed on {row}: {error!r}") from error
        except Exception as error:  # named, so that it is found in a log of many workers
            raise RuntimeError(f"{type(verifier).__name__} failed on {row}: {error!r}") from error

    def _count(self, score: Score, response: str, sample: Mapping[str, Any]) -> None:
        self.num_scored += 1
        if not score.is_unverified:
            return
        self.num_unverified += 1
        logger.warning(
            "answer %r could not be verified (%s): its reward is 0, and it is flagged `unverified` "
            "(%d of %d samples of this worker so far)",
            score.pred[:200],
            score.method,
            self.num_unverified,
            self.num_scored,
        )
        if self.options.unverified_dir:
            row = {"response": response, "ground_truth": sample["reward_model"]["ground_truth"]}
            row["prompt"] = problem_text(sample)
            row |= {name: sample.get(name, "") for name in ("data_source", "ability", "index", "uid", "global_steps")}
            folder = Path(self.options.unverified_dir)
            folder.mkdir(parents=True, exist_ok=True)
            # Each process has its own file and writes each row at once: a killed process leaves whole lines behind.
            with open(folder / f"unverified-{socket.gethostname()}-{os.getpid()}.jsonl", "ab", buffering=0) as file:
                line = jsonl.dumps(row | {"pred": score.pred, "method": score.method}, default=str)
                file.write(f"{line}\n".encode())

    def _shape(self, num_tokens: int) -> dict[str, float]:
        """Return the length penalties that are configured."""
        options, length, parts = self.options, torch.tensor([num_tokens]), {}
        if options.overlong_buffer is not None:
            penalty = overlong_penalty(length, max_length=options.max_resp_len, buffer=options.overlong_buffer)
            parts["reward_overlong"] = options.overlong_factor * penalty.item()
        if options.length_penalty:
            parts["reward_length"] = piecewise_length_penalty(length, options.length_penalty).item()
        return parts

    def _draw(self, sample: Mapping[str, Any], token_ids: list[int]) -> float:
        """Draw uniformly from [0, 1), repeatably: by a hash of the seed, the sample's place in the run and its tokens.

        The place (problem, step, session) gives equal responses separate draws: no response is rewarded as such.
        """
        place = [str(sample.get(name)) for name in ("index", "global_steps", "session_id")]
        drawn_from = repr((self.options.random_reward_seed, place, token_ids)).encode()
        return int.from_bytes(hashlib.blake2b(drawn_from, digest_size=8).digest()) / 2**64
