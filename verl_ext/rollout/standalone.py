"""What commands outside of a run take from verl and Ray: the tokenizer, the agent loop, the number of CPUs."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from verl_ext.rollout.agents import loop_of_run
from verl_ext.rollout.base import EpisodeLoop
from verl_ext.rollout.chat import ChatLoop, ChatServer


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer as verl does. Raises OSError or ValueError if it cannot."""
    from verl.utils import hf_tokenizer

    return hf_tokenizer(str(path), trust_remote_code=trust_remote_code)


def make_loop(config: DictConfig, server: Any, tokenizer: Any, tools: list[Any], **settings: Any) -> EpisodeLoop:
    """Return the agent loop of a run, to which any server (servers.py, chat.py) generates; a chat endpoint plays in the
    built-in loop, whatever `retool.agent.run` is.

    Args:
        config: the run's.
        tools: of `environments.toolbox.load_tools`.
        settings: of the loop, such as `protocol`, `hf_model_type`.
    """
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap

    loop = ChatLoop if isinstance(server, ChatServer) else loop_of_run
    return loop(
        trainer_config=DictConfigWrap(config),
        server_manager=server,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=None,
        data_config=DictConfigWrap(config.data),
        tools=ToolListWrap(tools),
        **settings,
    )


def cpus_of_ray() -> int:
    """Return the number of CPUs that Ray would count on this machine."""
    from ray._private.utils import get_num_cpus

    return int(get_num_cpus())
