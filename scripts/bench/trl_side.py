"""TRL's side of vs_trl.py: GRPO on the same task by TRL's GRPOTrainer, the sandbox as its tool.

With --run and --notes it is TRL's side of chaos.py instead: checkpoints go into one folder, rollouts and times
into the other, and the same command continues from the last checkpoint. JUDGE_URL in the environment names a judge that
scores the answers.

Runs in TRL's own environment and imports nothing of this project. It is what a user of TRL would write, with the same
merged SFT model and prompts; batch, clip and learning rate are --sizes, the run's own. GRPOTrainer has no dynamic
sampling and no overlong shaping, and needs no old log-probabilities: it does less per step.
"""

import argparse
import functools
import json
import os
import re
import time
from pathlib import Path

import requests
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# How TRL sees the protocol: `<code>..</code>` is a call of the tool `python`; its answer continues the same turn. TRL
# looks for the end of a call at the tokenizer's end token, and checks that a template can render any tool's name.
STOP = "</code>"
CHAT_TEMPLATE = (
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}{{ '\n<interpreter>\n' ~ m.content ~ '\n</interpreter>\n' }}"
    "{%- elif m.tool_calls %}{%- set call = m.tool_calls[0].function %}<|im_start|>assistant\n{{ m.content }}<code>"
    "{{ call.arguments.code if 'code' in call.arguments else call.name ~ call.arguments }}</code>"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|im_start\|>assistant\n|</interpreter>\n",
    "fields": {
        "tool_calls": {
            "open": "<code>",
            "close": "</code>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "python", "arguments": {"code": "{content}"}}},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
HTTP = requests.Session()
HTTP.trust_env = False  # through no proxy of the environment


SAVE_EVERY = 2  # steps


def reward(completions: list, ground_truth: list[str], **_: object) -> list[float]:
    if judge := os.environ.get("JUDGE_URL"):
        return [ask(judge, text_of(messages), truth) for messages, truth in zip(completions, ground_truth, strict=True)]
    answers = [BOXED.findall(messages[-1].get("content") or "") for messages in completions]
    return [1.0 if found and found[-1] == truth else -1.0 for found, truth in zip(answers, ground_truth, strict=True)]


def ask(judge: str, response: str, truth: str) -> float:
    """Return the verdict of a model over HTTP: +1 or -1."""
    prompt = f"<reference_answer>\n{truth}\n</reference_answer>\n<response>\n{response}\n</response>"
    body = {"model": "judge", "messages": [{"role": "user", "content": prompt}]}
    said = HTTP.post(f"{judge}/chat/completions", json=body, timeout=60).json()
    return 2 * float(said["choices"][0]["message"]["content"].removeprefix("Score: ")) - 1


def text_of(messages: list[dict]) -> str:
    """Return a response as the model wrote and read it."""
    parts = []
    for message in messages:
        calls = "".join(
            f"<code>{call['function']['arguments'].get('code', '')}</code>" for call in message.get("tool_calls") or ()
        )
        content = message.get("content") or ""
        parts.append(f"\n<interpreter>\n{content}\n</interpreter>\n" if message["role"] == "tool" else content + calls)
    return "".join(parts)


class Notes(TrainerCallback):
    """What chaos.py judges a run by: rollouts by step, as verl dumps them, and the duration of each step."""

    def __init__(self, folder: Path, updates: int):
        self.folder, self._updates, self._began = folder, updates, time.time()
        self._metrics = folder / f"metrics-{int(self._began)}.jsonl"
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)

    def reward(
        self, prompts: list, completions: list, ground_truth: list[str], trainer_state: object, **_: object
    ) -> list:
        scores = reward(completions, ground_truth)
        step = trainer_state.global_step // self._updates + 1
        with open(self.folder / "rollouts" / f"{step}.jsonl", "w") as file:
            for prompt, messages, truth, score in zip(prompts, completions, ground_truth, scores, strict=True):
                question = f"user\n{prompt[-1]['content']}\nassistant\n"
                row = {"input": question, "output": text_of(messages), "gts": truth, "score": score, "step": step}
                file.write(json.dumps(row) + "\n")
        return scores

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        if state.global_step % self._updates == 0:
            now = time.time()
            took, self._began = now - self._began, now
            with open(self._metrics, "a") as file:
                line = {"step": state.global_step // self._updates, "data": {"timing_s/step": took}}
                file.write(json.dumps(line) + "\n")


class Clock(TrainerCallback):
    """The time at which each optimizer step ended, in seconds since the epoch."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.ends.append(time.time())


class StringStop(GRPOTrainer):
    """Trainer for a tokenizer that has several tokens for `STOP`: generation stops at the string, not at an end token.

    TRL 1.16.0 only knows end tokens. It keeps the end token with which `generate` pads a sequence that stopped before
    others, and it locates the start of a tool's answer by the last end token of a template.
    """

    def _generate_single_turn(self, *args: object, **kwargs: object) -> tuple:
        completions, log_probs = super()._generate_single_turn(*args, **kwargs)
        return [self.without_padding(ids) for ids in completions], log_probs

    def without_padding(self, ids: list[int]) -> list[int]:
        padded = ids[-1:] == [self._tokenizer.pad_token_id] and STOP in self._tokenizer.decode(ids[-9:-1])[-9:]
        return ids[:-1] if padded else ids

    def _get_tool_suffix_ids(self, tool_messages: list[dict]) -> list[int]:
        answers = (f"\n<interpreter>\n{message['content']}\n</interpreter>\n" for message in tool_messages)
        return self._tokenizer.encode("".join(answers), add_special_tokens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="merged SFT checkpoint")
    parser.add_argument("--data", required=True, help="rl_train.parquet")
    url = os.environ.get("SANDBOX_URL")
    parser.add_argument("--sandbox", default=url, required=not url, help="base URL (default: SANDBOX_URL)")
    parser.add_argument("--sizes", type=json.loads, required=True, help="JSON, as `sizes` in vs_trl.py")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", required=True, help="JSON file for the figures")
    parser.add_argument("--run", type=Path, help="folder of checkpoints, for chaos.py")
    parser.add_argument("--notes", type=Path, help="folder of the rollouts and times of --run")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    if bool(args.run) != bool(args.notes):
        parser.error("--run and --notes need each other")
    sizes = args.sizes

    def python(code: str) -> str:
        """Run Python code.

        Args:
            code: the program.

        Returns:
            What it printed, or the last line of its traceback.
        """
        body = {"code": code, "language": "python", "run_timeout": sizes["code_timeout_s"]}
        answer = HTTP.post(f"{args.sandbox}/run_code", json=body, timeout=60).json()
        run = answer["run_result"]
        return (run["stdout"] or run["stderr"].strip().rpartition("\n")[2]).strip()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    shown = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    system_prompt = json.dumps(shown.partition("<|im_start|>user")[0])  # of the model's own template, maybe empty
    tokenizer.chat_template = f"{{{{ {system_prompt} }}}}" + CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    if len(tokenizer.encode(STOP, add_special_tokens=False)) == 1:
        trainer_class, generation = GRPOTrainer, None
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(STOP)]
        tokenizer.eos_token = STOP
    else:
        trainer_class, generation = StringStop, {"stop_strings": [STOP]}
        model.generate = functools.partial(model.generate, tokenizer=tokenizer)

    data = load_dataset("parquet", data_files=args.data, split="train")
    data = data.map(lambda row: {"ground_truth": row["reward_model"]["ground_truth"]}).select_columns(
        ["prompt", "ground_truth"]
    )
    clock, updates = Clock(), sizes["responses"] // sizes["mini_batch"]  # updates of a step
    notes = Notes(args.notes, updates) if args.run else None
    saving = {"save_strategy": "steps", "save_steps": SAVE_EVERY * updates} if args.run else {"save_strategy": "no"}
    trainer = trainer_class(
        model=model,
        processing_class=tokenizer,
        reward_funcs=notes.reward if notes else reward,
        tools=[python],
        train_dataset=data,
        callbacks=[clock, notes] if notes else [clock],
        args=GRPOConfig(
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=sizes["micro_batch"],
            gradient_accumulation_steps=sizes["mini_batch"] // sizes["micro_batch"],
            steps_per_generation=sizes["responses"] // sizes["micro_batch"],
            num_generations=sizes["samples"],
            max_completion_length=sizes["response_tokens"],
            max_tool_calling_iterations=sizes["tool_calls"],
            generation_kwargs=generation,
            max_steps=updates * args.steps,
            learning_rate=sizes["lr"],
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=sizes["warmup_steps"],
            adam_beta2=sizes["beta2"],
            beta=0.0,
            epsilon=sizes["clip_low"],
            epsilon_high=sizes["clip_high"],
            loss_type="dapo",
            temperature=sizes["temperature"],
            gradient_checkpointing=False,
            logging_steps=updates,
            report_to="none",
            **saving,
            seed=args.seed,
            output_dir=str(args.run or f"{args.out}.trainer"),
        ),
    )
    if notes:
        order = dict.fromkeys(trainer._get_train_sampler())
        questions = [data[place]["prompt"][-1]["content"] for place in list(order)[: sizes["responses"] * args.steps]]
        (args.notes / "order.json").write_text(json.dumps(questions))
    trainer.train(resume_from_checkpoint=bool(args.run and list(args.run.glob("checkpoint-*"))))
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    figures = {
        "step_ends": clock.ends[updates - 1 :: updates],
        "reward": [entry["reward"] for entry in logs],
        "calls_per_response": [entry["tools/call_frequency"] for entry in logs],
        "tokens_per_response": [entry["completions/mean_length"] for entry in logs],
    }
    with open(args.out, "w") as file:
        json.dump(figures, file)


if __name__ == "__main__":
    main()
