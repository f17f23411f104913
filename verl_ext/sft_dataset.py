"""SFT on ReTool traces: the same tokens that a rollout would have, with the loss on what the model wrote only.

Used by `data.custom_cls` of configs/*_sft.yaml. verl's own MultiTurnSFTDataset renders message by message through the
chat template, which would put the interpreter's answer into a turn of its own and train on it when it stands inside the
text.
"""

from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, ListConfig
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl_ext.agent_loop.protocol import interpreter_block

PROMPT_ROLES = ("system", "user")


def response_segments(messages: list[dict[str, str]], eos: str) -> list[tuple[str, bool]]:
    """Split what follows the prompt into (text, written by the model?), in the order of the rollout's turns.

    Args:
        messages: assistant, interpreter, assistant, ...: the messages behind the last user message.
        eos: text of the token that ends the answer.
    Raises:
        ValueError: roles do not alternate, or the last message is not the model's.
    """
    roles = [message["role"] for message in messages]
    expected = ["assistant" if i % 2 == 0 else "interpreter" for i in range(len(roles))]
    if roles != expected or not roles or roles[-1] != "assistant":
        raise ValueError(f"expected roles assistant, interpreter, ..., assistant behind the prompt, but found {roles}")
    segments = [
        (message["content"] if message["role"] == "assistant" else interpreter_block(message["content"]), i % 2 == 0)
        for i, message in enumerate(messages)
    ]
    return segments[:-1] + [(segments[-1][0], True), (eos, True)]


class RetoolSFTDataset(Dataset):
    """One item per trace: `input_ids`, `position_ids` and `loss_mask`, int64[tokens], not padded.

    Args:
        parquet_files: files with a column `data.messages_key` of [{"role", "content"}, ...].
        tokenizer: of the model.
        config: verl's `data` section; read are `messages_key`, `max_length` (tokens) and `truncation` (error | right).
        processor: unused; part of verl's interface.
        max_samples: use the first so many rows; -1 for all.
    Raises:
        ValueError: a row is not a trace, or is longer than `max_length` and `truncation` is "error"; names file row and
            reason.
    """

    def __init__(
        self,
        parquet_files: str | list[str],
        tokenizer: PreTrainedTokenizerBase,
        config: DictConfig,
        processor: Any = None,
        max_samples: int = -1,
    ):
        files = list(parquet_files) if isinstance(parquet_files, list | ListConfig) else [parquet_files]
        self.tokenizer = tokenizer
        self.max_length = config.max_length
        self.truncation = config.truncation
        if self.truncation not in ("error", "right"):
            raise ValueError(
                f"data.truncation is {self.truncation!r}; traces can be cut on the 'right', or be an 'error'."
            )
        rows = pd.concat([pd.read_parquet(file, columns=[config.messages_key]) for file in files])[config.messages_key]
        if max_samples > 0:
            rows = rows.iloc[:max_samples]
        self.segments = [self._segments(list(row), number) for number, row in enumerate(rows)]

    def _segments(self, messages: list[dict[str, str]], row: int) -> list[tuple[str, bool]]:
        prompt_length = next((i for i, m in enumerate(messages) if m["role"] not in PROMPT_ROLES), len(messages))
        try:
            if prompt_length == 0:
                raise ValueError(f"expected a {' or '.join(PROMPT_ROLES)} message first")
            for message in messages:
                if not isinstance(message["content"], str):
                    raise ValueError(f"expected text from the {message['role']}, but found {message['content']!r}")
            response = response_segments(messages[prompt_length:], self.tokenizer.eos_token)
        except ValueError as error:
            raise ValueError(f"SFT row {row} is not a ReTool trace: {error}.") from None
        prompt = self.tokenizer.apply_chat_template(
            messages[:prompt_length], add_generation_prompt=True, tokenize=False
        )
        return [(prompt, False), *response]

    def __len__(self) -> int:
        return len(self.segments)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        texts, by_model = zip(*self.segments[index], strict=True)
        encoded = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        input_ids = torch.tensor([token for ids in encoded for token in ids])
        loss_mask = torch.tensor([int(own) for ids, own in zip(encoded, by_model, strict=True) for _ in ids])
        if len(input_ids) > self.max_length:
            if self.truncation == "error":
                raise ValueError(
                    f"SFT row {index} has {len(input_ids)} tokens, more than data.max_length={self.max_length}. "
                    "Raise max_length, drop the row, or set data.truncation=right."
                )
            input_ids, loss_mask = input_ids[: self.max_length], loss_mask[: self.max_length]
        return {"input_ids": input_ids, "position_ids": torch.arange(len(input_ids)), "loss_mask": loss_mask}
