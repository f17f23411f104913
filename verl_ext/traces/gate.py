"""The one gate for one trace: it is kept, or left out for one reason. What depends on several is in select.py.

Cheap checks come first: it parses and renders to itself, has calls, the answer is right, it fits, its problem is not of
an evaluation. Then its programs run once more.
"""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from verl_ext.datasets.rows import DataError
from verl_ext.datasets.sft import tokens_of
from verl_ext.datasets.text import EvaluationProblems
from verl_ext.environments.toolbox import load_tools
from verl_ext.episode import CallResult, Score
from verl_ext.protocols.base import CODE_TOOL, Call, SegmentEncoder, with_fixed_day
from verl_ext.protocols.by_name import make_protocol
from verl_ext.protocols.trace import Segment, TraceTurn, conversation_of, rendered_trace, split_trace
from verl_ext.reward.verifiers import RAISED_BY_TEXT, Verifiers, verify_response
from verl_ext.rollout.ways import Way, Ways
from verl_ext.settings import START
from verl_ext.traces.rerun import NotRun, check_outputs, run_calls
from verl_ext.traces.trace import LeftOut, Reason, Trace

_LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.JoinedStr, ast.FormattedValue)
_PLAIN = (ast.Module, ast.Expr, ast.Assign, ast.Import, ast.ImportFrom, ast.alias, ast.Pass, ast.keyword)
_PLAIN += (ast.expr_context, ast.unaryop)


@dataclass(frozen=True)
class Rules:
    """What a trace must be.

    Attributes:
        min_calls: calls of tools.
        needs_gold: a trace whose problem has no known answer is left out.
        computed: a trace whose programs only print literals is left out.
        max_tokens: of prompt and response; needs a tokenizer.
        evaluation: problems that may not be among its own; None: any may.
    """

    min_calls: int = 0
    needs_gold: bool = True
    computed: bool = False
    max_tokens: int | None = None
    evaluation: EvaluationProblems | None = None


@dataclass
class Checked:
    """A trace and what became of it. `left` is None if the trace passes; what was not looked at is empty."""

    trace: Trace
    left: LeftOut | None = None
    score: Score | None = None
    codes: list[str] = field(default_factory=list)  # its programs, and the arguments of its other calls as JSON
    text: str = ""  # what the model wrote
    is_down: bool = False  # sandbox or tool failed

    @property
    def has_run(self) -> bool:
        """Return whether its calls were run again, so sandbox and tools are well."""
        ran = self.left is None or self.left.reason in (Reason.OUTPUT_DIFFERS, Reason.NOT_DETERMINISTIC)
        return bool(self.codes) and ran


class Gate:
    """Checks traces as a run would roll them out: by its protocol, environment, tools and verifiers.

    Args:
        config: the run's.
        tokenizer: None: lengths are not checked, and the chat template is not used.
    Raises:
        ValueError: an environment, a tool or a verifier of the run cannot be made.
    """

    def __init__(self, config: DictConfig, rules: Rules, tokenizer: PreTrainedTokenizerBase | None = None):
        self._rules, self._tokenizer = rules, tokenizer
        multi_turn, kwargs = config.actor_rollout_ref.rollout.multi_turn, config.data.get("apply_chat_template_kwargs")
        self._kwargs = with_fixed_day(tokenizer, kwargs) if tokenizer else dict(kwargs or {})
        self._encoder = SegmentEncoder(tokenizer) if tokenizer else None
        make = partial(
            make_protocol,
            tokenizer=tokenizer,
            template_kwargs=self._kwargs,
            max_parallel_calls=multi_turn.max_parallel_calls,
        )
        self._ways = Ways(config, None, make, tokenizer, load_tools(multi_turn, START))
        self._verifiers = Verifiers.of_run(config)

    async def check(self, trace: Trace, finish: Any = None) -> Checked:
        """Return the trace with the first reason to leave it out, if there is one.

        Args:
            finish: as in `check.check`.

        Raises:
            DataError: its row is wrong: environment or verifier refuse it.
        """
        checked = Checked(trace)
        try:
            if finish is not None:
                checked.trace = await finish(self, trace)
            await self._check(checked)
        except LeftOut as why:
            checked.left = why
        except NotRun as error:
            checked.left, checked.is_down = LeftOut(Reason.NOT_CHECKED, str(error)), True
        return checked

    async def results(self, trace: Trace, calls: Sequence[Call]) -> list[CallResult]:
        """Return what the environment says to calls, one after the other, that the trace does not have yet.

        Raises:
            NotRun: sandbox or tool failed.
        """
        turns = [TraceTurn("", [call]) for call in calls]
        return await run_calls(self._ways.of(trace.task), _task_of(trace), turns)

    async def _check(self, checked: Checked) -> None:
        trace, rules = checked.trace, self._rules
        way = self._ways.of(trace.task)
        segments, turns = self._split(trace, way)
        checked.text = "\n".join(_without_end(segments, self._tokenizer))
        checked.codes = [_code_of(call.tool, call.arguments) for turn in turns for call in turn.calls]
        if len(checked.codes) < rules.min_calls:
            raise LeftOut(Reason.NO_CALL, f"{len(checked.codes)} calls, fewer than {rules.min_calls}")
        await self._check_answer(checked)
        if self._encoder and rules.max_tokens:
            length = len(tokens_of(segments, self._encoder)[0])
            if length > rules.max_tokens:
                raise LeftOut(Reason.TOO_LONG, f"{length} tokens, more than {rules.max_tokens}")
        if rules.evaluation and (overlap := rules.evaluation.find_overlap(trace.problem)):
            raise LeftOut(Reason.OVERLAP, f"{overlap[1]:.0%} of {overlap[0]}")
        if rules.computed and checked.codes and all(map(is_literal, checked.codes)):
            raise LeftOut(Reason.LITERAL_ONLY, "no program computes anything")
        try:
            await check_outputs(way, _task_of(trace), turns)
        except ValueError as error:
            raise DataError(f"{trace.source}, {trace.id}: its environment refuses it: {error}") from error

    def _split(self, trace: Trace, way: Way) -> tuple[list[Segment], list[TraceTurn]]:
        """Return what the model wrote and what stands between, with the prompt first if there is a tokenizer."""
        text = json.dumps(trace.messages)  # as JSON: nulls in a call count
        try:
            if self._tokenizer is None:
                segments = split_trace(text, trace.tools, way.protocol, "")[2]
            else:
                segments = rendered_trace(text, trace.tools, way.protocol, self._tokenizer, self._kwargs)
            return segments, conversation_of(text, trace.tools)[2]
        except ValueError as error:
            raise LeftOut(Reason.NOT_A_TRACE, str(error)) from error

    async def _check_answer(self, checked: Checked) -> None:
        trace = checked.trace
        checked.score = trace.score
        if checked.score is None:
            if trace.gold in (None, "", []):
                if self._rules.needs_gold:
                    raise LeftOut(Reason.NO_GOLD, "its problem has no known answer")
                return
            checked.score = await self._verify(trace, checked.text)
        if checked.score.acc is None:
            raise LeftOut(Reason.NOT_CHECKED, f"its answer could not be judged: {checked.score.method}")
        if checked.score.verdict == "no_answer":
            raise LeftOut(Reason.NO_ANSWER, checked.score.method)
        if checked.score.acc < 1.0:
            raise LeftOut(Reason.WRONG_ANSWER, f"{checked.score.pred[:200]!r} instead of {str(trace.gold)[:200]!r}")

    async def _verify(self, trace: Trace, response: str) -> Score:
        task = trace.task
        row = {"raw_prompt": trace.prompt, **task}
        verifier = self._verifiers.find(str(task.get("data_source") or ""), str(task.get("ability") or ""))
        try:
            return await verify_response(verifier, response, trace.gold, row)
        except RAISED_BY_TEXT as error:  # also on a plain response
            raise DataError(f"{trace.source}, {trace.id}: {type(verifier).__name__} refuses it: {error}") from error


def is_literal(code: str) -> bool:
    """Return whether a program only prints what it states: it has no operation, and calls nothing but `print`."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        is_negative = isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
        if not (is_print or is_negative or isinstance(node, _PLAIN + _LITERALS)):
            return False
    return True


def _task_of(trace: Trace) -> dict[str, Any]:
    """Return the row that an environment opens with."""
    return {"uid": trace.id, "session_id": 0, "raw_prompt": trace.prompt, **trace.task}


def _code_of(tool: str, arguments: Mapping[str, Any]) -> str:
    if tool == CODE_TOOL and isinstance(arguments.get("code"), str):
        return arguments["code"]
    return json.dumps({tool: arguments}, ensure_ascii=False, sort_keys=True)


def _without_end(segments: list[Segment], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Return what the model wrote, turn by turn, without end tokens."""
    eos = tokenizer.eos_token if tokenizer else ""
    return [text for segment in segments if segment.own and (text := "".join(segment.parts)) != eos]
