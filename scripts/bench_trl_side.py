"""TRL's side of scripts/bench_vs_trl.sh: GRPO on the tiny tool task by TRL's GRPOTrainer, the sandbox as its tool.

Runs in TRL's own environment and imports nothing of this project. It is what a user of TRL would write, with the same
merged SFT model, prompts, two updates per 128 responses, clip and learning rate as configs/tiny_dapo.yaml. GRPOTrainer
has no dynamic sampling and no overlong shaping, and needs no old log-probabilities: it does less per step.
"""

import argparse
import json
import re
import time

import requests
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# How TRL sees the protocol: `<code>..</code>` is a call of the tool `python`, its answer goes on in the same turn. TRL
# looks for the end of a call at the tokenizer's end token, and checks that a template can render any tool's name.
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


def reward(completions: list, ground_truth: list[str], **_: object) -> list[float]:
    answers = [BOXED.findall(messages[-1].get("content") or "") for messages in completions]
    return [1.0 if found and found[-1] == truth else -1.0 for found, truth in zip(answers, ground_truth, strict=True)]


class Clock(TrainerCallback):
    """When each optimizer step ended, in seconds since the epoch."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.ends.append(time.time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="merged SFT checkpoint")
    parser.add_argument("--data", required=True, help="rl_train.parquet")
    parser.add_argument("--sandbox", required=True, help="base URL")
    parser.add_argument("--steps", type=int, required=True, help="of 128 responses and two updates each")
    parser.add_argument("--out", required=True, help="JSON file for the figures")
    args = parser.parse_args()

    session = requests.Session()

    def python(code: str) -> str:
        """Run Python code.

        Args:
            code: the program.

        Returns:
            What it printed, or the last line of its traceback.
        """
        body = {"code": code, "language": "python", "run_timeout": 5}
        answer = session.post(f"{args.sandbox}/run_code", json=body, timeout=60).json()
        run = answer["run_result"]
        return (run["stdout"] or run["stderr"].strip().rpartition("\n")[2]).strip()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    end = tokenizer.eos_token_id
    tokenizer.eos_token = "</code>"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    model.generation_config.eos_token_id = [end, tokenizer.eos_token_id]

    data = load_dataset("parquet", data_files=args.data, split="train")
    data = data.map(lambda row: {"ground_truth": row["reward_model"]["ground_truth"]}).select_columns(
        ["prompt", "ground_truth"]
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        tools=[python],
        train_dataset=data,
        callbacks=[clock],
        args=GRPOConfig(
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=64,
            steps_per_generation=2,
            num_generations=8,
            max_completion_length=128,
            max_tool_calling_iterations=3,
            max_steps=2 * args.steps,
            learning_rate=3e-4,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=3,
            adam_beta2=0.98,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            temperature=1.0,
            gradient_checkpointing=False,
            logging_steps=2,
            report_to="none",
            save_strategy="no",
            output_dir=f"{args.out}.trainer",
        ),
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    figures = {
        "step_ends": clock.ends[1::2],
        "reward": [entry["reward"] for entry in logs],
        "calls_per_response": [entry["tools/call_frequency"] for entry in logs],
    }
    with open(args.out, "w") as file:
        json.dump(figures, file)


if __name__ == "__main__":
    main()
