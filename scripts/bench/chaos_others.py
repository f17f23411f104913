"""Configure stock verl 0.9.1 and TRL for the faults of chaos.py, and measure what the runs left."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from scripts.bench.chaos_measure import Stall, longest_gap, run_again, summary
from verl_ext.reward.score import score_answer
from verl_ext.runs import jsonl, parquet
from verl_ext.settings import compose_run

FOLDER = Path(__file__).resolve().parent / "stock"
DUMPS = "rollouts"  # subfolder of the notes
OPEN, CLOSE = "<code>", "</code>"
_REPLY = re.compile(r"\n<interpreter>\n(.*?)\n</interpreter>\n?", re.DOTALL)
Rollout = Mapping[str, Any]  # a row of verl's dump: input, output, gts, score, step


class Sizes(NamedTuple):
    """Sizes that a run's dumps are judged by.

    Attributes:
        order: the problems, in the order in which they are drawn.
        samples: rollouts per problem.
        tokens: of a response, at most.
        turns: of the model in a response, at most.
        slack: problems that may be under way when the last one that trained is drawn.
        from_first: whether a call begins at the first `<code>` of its turn, as TRL's parser has it.
    """

    model: str
    order: Sequence[str]
    samples: int
    tokens: int
    turns: int
    slack: int = 0
    from_first: bool = False


# The model's own form: a call is `<code>..</code>`, and the tool's output continues the same turn.
CHAT_TEMPLATE = (
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}{{ '\n<interpreter>\n' ~ m.content ~ '\n</interpreter>\n' }}"
    "{%- else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ ('' if m.tool_calls else '<|im_end|>\n') }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def stock_config(overrides: Sequence[str], source: Path, run: Path, notes: Path) -> DictConfig:
    """Compose a config of the tiny run's sizes and verl's own parts: agent loop, sampler, reward manager, optimizer.

    Args:
        overrides: of tiny_dapo.
        source: the quickstart that has the data and the SFT model.
        run: folder of the checkpoints.
        notes: folder of the dumps.
    """
    config = compose_run("tiny_dapo", overrides)
    OmegaConf.resolve(config)
    OmegaConf.set_struct(config, False)
    retool = config.pop("retool")
    optim = config.actor_rollout_ref.actor.optim
    own = {"agent_loop_manager_class": None, "agent_loop_config_path": None, "default_agent_loop": "tool_agent"}
    multi_turn = {"enable": True, "format": "code", "function_tool_path": str(FOLDER / "stock_tool.py")}
    multi_turn |= {"max_assistant_turns": retool.max_tool_calls + 1}
    sampler = {"custom_sampler": {"path": None, "name": None}, "sampler_kwargs": {}}
    optim._target_ = "verl.workers.config.FSDPOptimizerConfig"
    for name in ("lr_decay_steps_ratio", "lr_decay_type"):
        optim.pop(name)
    config.actor_rollout_ref.rollout.agent.update(own)
    config.actor_rollout_ref.rollout.multi_turn.update(multi_turn)
    config.actor_rollout_ref.model.path = str(source / "sft" / "merged")
    config.actor_rollout_ref.model.custom_chat_template = CHAT_TEMPLATE
    config.reward.reward_manager.update({"source": "register", "name": "naive"})
    config.reward.custom_reward_function.update({"path": str(FOLDER / "stock_tool.py"), "name": "compute_score"})
    config.reward.pop("reward_kwargs")
    config.trainer.v1.sampler.update(sampler)
    config.algorithm.filter_groups = None
    config.data.update(
        train_files=str(source / "data" / "rl_train.parquet"), val_files=str(source / "data" / "eval.parquet")
    )
    config.ray_kwargs.ray_init.address = "local"  # not another run's Ray
    config.trainer.update(default_local_dir=str(run), rollout_data_dir=str(notes / DUMPS))
    return config


def rollouts(notes: Path) -> list[Rollout]:
    """Read the trained rollouts; of a step that was repeated, those of its last time."""
    return [row for path in _dumps(notes) for row in jsonl.read(path)]


def _dumps(notes: Path) -> list[Path]:
    return sorted((notes / DUMPS).glob("*.jsonl"), key=lambda path: int(path.stem))


def wrong_scores(rows: Iterable[Rollout]) -> list[str]:
    """List rollouts whose reward is not that of their answer, which is scored again here."""
    found = []
    for number, row in enumerate(rows):
        expected = 2 * score_answer(_REPLY.sub("\n", row["output"]), row["gts"]).acc - 1
        if expected != row["score"]:
            found.append(f"{number}: trained with the reward {row['score']:g}, but its answer has {expected:g}")
    return found


def calls_of(output: str, *, from_first: bool = False) -> tuple[list[tuple[str, str | None]], int]:
    """Return the calls of a response, (program, the tool's output or None), and the number of its turns.

    A call is the end of a turn, starting at its last `<code>` as in verl's parser (stock/stock_verl.py), or at
    its first.
    """
    pieces = _REPLY.split(output)  # turn, reply, turn, reply, ..., turn
    found = []
    for turn, reply in itertools.zip_longest(pieces[::2], pieces[1::2]):
        _, opened, program = turn.partition(OPEN) if from_first else turn.rpartition(OPEN)
        if opened and program.endswith(CLOSE):
            found.append((program.removesuffix(CLOSE), reply))
    return found, len(pieces[::2])


def wrong_answers_of_tools(rows: Sequence[Rollout], sandbox: str, sizes: Sizes) -> list[str]:
    """List rollouts that received output their program does not print when it is run again, or none although there was
    room: verl ends a response at a call whose answer, such as the text of an error, is too long for it.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sizes.model)
    calls = [calls_of(row["output"], from_first=sizes.from_first) for row in rows]
    truth = run_again({program for found, _ in calls for program, _ in found}, sandbox)
    says = {code: (said.stdout or said.stderr.strip().rpartition("\n")[2]).strip() for code, said in truth.items()}
    wrong = []
    for number, (row, (found, turns)) in enumerate(zip(rows, calls, strict=True)):
        for program, told in found:
            answer = says[program]
            whole = f"{row['output']}\n<interpreter>\n{answer}\n</interpreter>\n"
            if told is not None and told != answer:
                wrong.append(f"{number}: was told {told!r}, but the program prints {answer!r}")
            if told is None and turns < sizes.turns and len(tokenizer.encode(whole)) < sizes.tokens:
                wrong.append(f"{number}: ended at its call without an answer, but the program prints {answer!r}")
    return wrong


def drawn(config: DictConfig) -> list[str]:
    """Return the problems of the first epoch in the order in which verl draws them."""
    from verl.trainer.ppo.utils import create_rl_sampler

    prompts = parquet.read(Path(config.data.train_files), ["prompt"])["prompt"].to_pylist()
    return [prompts[place][-1]["content"] for place in create_rl_sampler(config.data, range(len(prompts)))]


def lost_and_doubled(rows: Sequence[Rollout], sizes: Sizes) -> tuple[list[str], list[str]]:
    """Describe lost and doubled prompts, in a sentence each."""
    trained, n = Counter(question_of(row) for row in rows), sizes.samples
    place = {question: number for number, question in enumerate(sizes.order)}
    last = max(place[question] for question in trained)
    gone = [each for each in sizes.order[: max(0, last + 1 - sizes.slack)] if not trained[each]]
    lost = [f"{each!r} was drawn but did not train" for each in gone]
    lost += [f"{each!r} trained with {count} rollouts of {n}" for each, count in trained.items() if count < n]
    return lost, [f"{each!r} trained with {count} rollouts, not {n}" for each, count in trained.items() if count > n]


def question_of(row: Rollout) -> str:
    return row["input"].removeprefix("user\n").removesuffix("assistant\n").strip()


def stall(notes: Path) -> Stall:
    """Find the longest time without progress, which is a step whose rollouts were dumped: nothing smaller is timed."""
    return longest_gap(notes, [path.stat().st_mtime for path in _dumps(notes)])


def figures(notes: Path, sandbox: str, log: Path, fault_at: int, sizes: Sizes) -> dict[str, Any]:
    """Compute the figures of chaos_measure.figures; how much was kept out of training is not known."""
    rows = rollouts(notes)
    wrong = [*wrong_scores(rows), *wrong_answers_of_tools(rows, sandbox, sizes)]
    lost, doubled = lost_and_doubled(rows, sizes)
    return {"excluded": None, "servers": None} | summary(len(rows), wrong, lost, doubled, stall(notes), log, fault_at)


def verl_sizes(config: DictConfig) -> Sizes:
    """Return the sizes of `stock_config`."""
    rollout = config.actor_rollout_ref.rollout
    slack = 0 if config.trainer.v1.trainer_mode == "sync" else 3 * config.data.train_batch_size
    limits = config.data.max_response_length, rollout.multi_turn.max_assistant_turns
    return Sizes(config.actor_rollout_ref.model.path, drawn(config), rollout.n, *limits, slack)


def trl_sizes(model: Path, notes: Path, sizes: Mapping[str, Any]) -> Sizes:
    """Return the sizes of a run of trl_side.py; `sizes` are those of vs_trl.py."""
    order = json.loads((notes / "order.json").read_text())
    own = order, sizes["samples"], sizes["response_tokens"], sizes["tool_calls"] + 1
    return Sizes(str(model), *own, from_first=True)
