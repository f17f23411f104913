"""Keep the log working: warnings that a package of vLLM hides, and a call of verl's logger that raises."""

import logging
import os
from types import ModuleType
from typing import Any

from verl_ext.versions import VERL, Library, require_versions


def keep_warnings(logging_config: ModuleType) -> None:
    """Let warnings through again, unless the user set one of the two variables.

    When it is imported, `model_hosting_container_standards` (0.1.x) sets the root logger and its handlers to ERROR,
    unless LOG_LEVEL or SAGEMAKER_CONTAINER_LOG_LEVEL is set (its logging_config.py:42).
    """
    if {"LOG_LEVEL", "SAGEMAKER_CONTAINER_LOG_LEVEL"} & os.environ.keys():
        return
    root = logging.getLogger()
    root.setLevel(logging.WARNING)  # Python's own
    for handler in root.handlers:
        if handler.level == logging.ERROR:
            handler.setLevel(logging.NOTSET)


def ignore_flush(module: Library) -> None:
    """Drop `flush=True` from a call of verl's logger, which raises TypeError (trainer_separate_async.py:179, 0.9.1).

    The call is only made with `hybrid_engine=false`.
    """
    require_versions(VERL, "verl_ext/rollout/logs.py")

    class Adapter(logging.LoggerAdapter):
        def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
            kwargs.pop("flush", None)
            return msg, kwargs

    module.logger = Adapter(module.logger, {})
