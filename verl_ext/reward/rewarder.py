"""From a verifier's verdict to the reward of one episode, and what it is made of."""

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verl_ext.episode import Episode, Reward, ToolUse
from verl_ext.objectives.shaping import overlong_penalty, piecewise_length_penalty, tool_bonus
from verl_ext.outcome import UNVERIFIED, RolloutEnd, infrastructure_failure
from verl_ext.records.problem import id_of, problem_of
from verl_ext.reward.numbers import BrokenReward
from verl_ext.reward.options import RewardOptions
from verl_ext.reward.score import Score
from verl_ext.reward.terms import BUILT_IN
from verl_ext.reward.verifiers import RAISED_BY_TEXT, Verifiers, problem_text, verify_response
from verl_ext.runs import jsonl
from verl_ext.settings.domains import read_domains

logger = logging.getLogger(__name__)


class Rewarder:
    """+1/-1 on the answer in the model's own tokens; length penalties, a tool bonus, own terms, a control as options.

    A sample that the infrastructure failed (`finish_reason` "sandbox_failure" or "aborted", or an answer
    that could not be verified, for which its own text is never the reason) is not scored as wrong: it gets the reward
    0.0, halfway between right and wrong, and the flag `sandbox_failure` or `unverified` or the finish reason. By these,
    the sampler keeps it out of training (verl_ext/trainer/sampler.py), and the figures of a validation
    (verl_ext/trainer/failed_samples.py) and of an evaluation (verl_ext/evaluation/figures.py) leave it out. A broken
    row, verifier or term stops the run: a row without a ground truth, an `acc` of NaN.

    Args:
        config: a whole run's.
        tokenizer: the policy's.
    Raises:
        ValueError: `reward.reward_kwargs` has an unknown or impossible setting.
    """

    def __init__(self, config: Any, tokenizer: Any):
        self.tokenizer = tokenizer
        self.options = RewardOptions.from_config(config)
        self.verifiers = Verifiers.of_run(config)
        self._limits = {name: domain.response_tokens for name, domain in read_domains(config).items()}
        self.num_scored = 0
        self.num_unverified = 0

    async def score_episode(self, episode: Episode, sample: Mapping[str, Any]) -> Reward:
        """Score one episode. A verifier may take seconds; the event loop keeps running meanwhile.

        Args:
            episode: its last row is scored; without spans, all of the row counts as the model's. Lengths and turns
                are those of all rows.
            sample: `reward_model.ground_truth`, `data_source`.
        Returns:
            The reward, with the same names for every sample: `acc` (the truth, in [0, 1]; 0 when unverified),
            `train_acc` (which the reward was made of), `score` (the reward), its parts `reward_base`,
            `reward_overlong`, `reward_length`, `reward_tool_bonus` and `reward_NAME` of each own term with its weight,
            `unverified`, `sandbox_failure`, `response_tokens` and the loop's counts as floats; `pred`, `verdict`,
            `method`, `data_source`, `id` (of `extra_info`), `problem` (records/problem.py), `finish_reason`,
            `normalised` as strings, "" for nothing.
        Raises:
            BrokenReward: the row, its verifier or a term is broken; the message names it. The run stops.
            RuntimeError: the verifier could not reach a worker or a server, and did not say "unknown".
        """
        options, token_ids, use = self.options, episode.row.ids, episode.use or ToolUse()
        spans = episode.row.model_spans or [(0, len(token_ids))]
        finish_reason = str(episode.finish_reason)

        response = await asyncio.to_thread(self._decode, token_ids, spans)
        score = episode.score if episode.score is not None else await self._verify(response, sample)
        flags = {
            UNVERIFIED: float(score.is_unverified),
            "sandbox_failure": float(finish_reason == RolloutEnd.SANDBOX_FAILURE),
        }
        infrastructure_failed = infrastructure_failure(flags | {"finish_reason": finish_reason}) is not None
        self._count(score, response, sample)
        num_model_tokens = sum(end - start for row in episode.rows[:-1] for start, end in row.model_spans)
        num_model_tokens += sum(end - start for start, end in spans)

        acc = train_acc = score.acc or 0.0
        if options.random_reward_p is not None:
            train_acc = float(self._draw(sample, token_ids) < options.random_reward_p)
        if infrastructure_failed:
            train_acc = 0.5
        judged, fails = replace(episode, score=score), infrastructure_failed
        parts = await asyncio.to_thread(self._parts, judged, sample, train_acc=train_acc, fails=fails)
        reward = sum(parts.values())
        if options.reward_floor is not None:
            reward = max(reward, options.reward_floor)
        counts = {
            "response_tokens": num_model_tokens,
            "tool_calls": use.calls,
            "tool_errors": use.failed,
            "tool_timeouts": use.errors.get("timeout", 0),
            "model_turns": sum(len(row.model_spans) for row in episode.rows),
            "truncated": episode.is_truncated,
        }
        info = {
            "acc": acc,
            "train_acc": train_acc,
            "score": reward,
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

    def _parts(self, judged: Episode, sample: Mapping[str, Any], *, train_acc: float, fails: bool) -> dict[str, float]:
        """Return the parts of the reward by name; what infrastructure failed (`fails`) has only its base."""
        options = self.options
        names = (*BUILT_IN, *(term.name for term in options.terms))
        parts = {f"reward_{name}": 0.0 for name in names} | {"reward_base": 2.0 * train_acc - 1.0}
        if fails:
            return parts
        is_of_model = options.overlong_counts == "model" and judged.row.model_spans
        # Of all rows: what a model writes can make a row begin, and a penalty must not be escaped so.
        tokens = judged.num_model_tokens if is_of_model else sum(len(row.ids) for row in judged.rows)
        length = torch.tensor([tokens])
        if options.overlong_buffer is not None:
            # A domain's own limit may cut its responses before the run's length; the buffer is the same share of it.
            limit = self._limits.get(str(sample.get("data_source", ""))) or options.max_resp_len
            max_length = min(options.max_resp_len, limit)
            buffer = max(1, options.overlong_buffer * max_length // options.max_resp_len)
            penalty = overlong_penalty(length, max_length=max_length, buffer=buffer)
            parts["reward_overlong"] = options.overlong_factor * penalty.item()
        if options.length_penalty:
            parts["reward_length"] = piecewise_length_penalty(length, options.length_penalty).item()
        if options.tool_bonus and not train_acc:
            parts["reward_tool_bonus"] = tool_bonus(torch.tensor([judged.use.calls if judged.use else 0])).item()
        return parts | {f"reward_{term.name}": term.weight * term.value(judged, sample) for term in options.terms}

    def _draw(self, sample: Mapping[str, Any], token_ids: list[int]) -> float:
        """Draw uniformly from [0, 1), repeatably: by a hash of the seed, the sample's place in the run and its tokens.

        The place (problem, step, session) gives equal responses separate draws: no response is rewarded as such.
        """
        place = [str(sample.get(name)) for name in ("index", "global_steps", "session_id")]
        drawn_from = repr((self.options.random_reward_seed, place, token_ids)).encode()
        return int.from_bytes(hashlib.blake2b(drawn_from, digest_size=8).digest()) / 2**64
