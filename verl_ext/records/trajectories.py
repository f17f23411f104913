"""One JSON line per trajectory: prompt, turns with text, calls and timings, end reason, reward parts.

Written by the agent-loop workers (rollout/workers.py) if `retool.trajectory_log.enable`. One file per process, rotated.
"""

import logging
import math
import os
import socket
from collections.abc import Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.outcome import rollout_end
from verl_ext.records import jsonl


class TrajectoryLog:
    """Appends records to `{folder}/{host}-{pid}.jsonl`; a full file becomes `.1`, `.2`, ... and the oldest goes.

    Args:
        max_mb: above 0; size of a file, in 2**20 bytes, at which the next one begins.
        max_files: at least 2, that are kept of this process, the current one included.
    """

    def __init__(self, folder: str | Path, *, max_mb: float, max_files: int):
        file = Path(folder) / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        jsonl.cut_half_line(file)  # of a killed process: in a container the next one may have its name and number
        # A handler without a logger: nothing else may write to the file, and no level can switch it off.
        self._handler = RotatingFileHandler(
            file, maxBytes=math.ceil(max_mb * 2**20), backupCount=max_files - 1, encoding="utf-8", delay=True
        )

    def write(self, record: Mapping[str, Any]) -> None:
        self._handler.emit(logging.makeLogRecord({"msg": jsonl.dumps(record, default=str)}))


def check_trajectory_log(config: DictConfig) -> None:
    """Raise where trajectories are to be logged and nothing would write them; called when a run starts.

    A record has the rewards, which the agent loop does not know: it is written by the agent-loop workers, and verl's
    own would put it into the data storage instead.

    Args:
        config: of the run.
    Raises:
        ValueError: `retool.trajectory_log.enable` with verl's own agent-loop manager.
    """
    if not OmegaConf.select(config, "retool.trajectory_log.enable"):
        return
    if OmegaConf.select(config, "actor_rollout_ref.rollout.agent.agent_loop_manager_class") is None:
        raise ValueError(
            "retool.trajectory_log.enable is true, but actor_rollout_ref.rollout.agent.agent_loop_manager_class is "
            "null, and verl's own agent-loop workers write no trajectories. Name "
            "verl_ext.rollout.workers.LeanAgentLoopManager there, or set retool.trajectory_log.enable=false."
        )


def trajectory_record(
    trajectory: Mapping[str, Any], extra_fields: Mapping[str, Any], sample: Mapping[str, Any], *, validate: bool
) -> dict[str, Any]:
    """What is written of one rollout.

    Args:
        trajectory: `prompt` and `turns` as the agent loop recorded them.
        extra_fields: the rollout's, with the reward manager's `reward_extra_info`.
        sample: the row of the data set, with `uid`, `session_id`, `global_steps`.
    """
    info = extra_fields.get("reward_extra_info") or {}
    return {
        "uid": sample.get("uid"),
        "session": sample.get("session_id"),
        "step": sample.get("global_steps"),
        "validate": validate,
        "index": sample.get("index"),
        "data_source": sample.get("data_source"),
        "ground_truth": (sample.get("reward_model") or {}).get("ground_truth"),
        "finish_reason": rollout_end({"finish_reason": extra_fields.get("finish_reason"), **info}),
        "reward": info,
        "versions": [extra_fields.get("min_global_steps"), extra_fields.get("max_global_steps")],
        "version_spans": extra_fields.get("version_spans"),
        "tool_use": extra_fields.get("tool_use"),
        **trajectory,
    }
