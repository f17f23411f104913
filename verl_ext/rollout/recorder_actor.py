"""The run's recorder (records/recorder.py) as a Ray actor: the trainer starts it, all others find it by its name."""

import logging
import os
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_ext.records.recorder import REST_S, Recorder
from verl_ext.settings import RecorderSettings

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

NAME = "retool_recorder"


def start(run: Path, settings: RecorderSettings) -> Any:
    """Return the handle of a new recorder on this machine, where the run's folder is.

    If its process dies, Ray starts another one, and the groups that it held are lost.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Recorder).options(
        name=NAME,
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy=here,
        enable_task_events=False,  # they take a tenth of a message's cost
        runtime_env={"env_vars": {"RAY_event_stats": "0"}},  # these take a tenth of this process's CPU time
    )
    return actor.remote(run, settings, REST_S)


def find() -> Any:
    """Return the handle of the run's recorder; None, with a warning, if there is none."""
    try:
        return ray.get_actor(NAME)
    except ValueError as error:
        logger.warning("retool.recorder.enable is true, but no recorder was found (%s). Nothing is recorded.", error)
        return None


def close(actor: Any) -> None:
    """Wait until the last files of a finished run are written, at most a minute. A failure is only a warning."""
    try:
        ray.get(actor.close.remote(), timeout=60)
    except RayError as error:
        logger.warning("recorder: the last steps may lack rollouts because it could not be closed (%s).", error)
