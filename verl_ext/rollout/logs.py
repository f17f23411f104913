"""Warnings of verl and of ours, which a package that vLLM imports would hide.

`model_hosting_container_standards` (0.1.x) lets the root logger and each handler that is there already pass errors
alone, when it is imported, unless LOG_LEVEL or SAGEMAKER_CONTAINER_LOG_LEVEL is set (its logging_config.py:42).
"""

import logging
import os
from types import ModuleType


def keep_warnings(logging_config: ModuleType) -> None:
    """Undo it, unless the user has set one of the two variables."""
    if {"LOG_LEVEL", "SAGEMAKER_CONTAINER_LOG_LEVEL"} & os.environ.keys():
        return
    root = logging.getLogger()
    root.setLevel(logging.WARNING)  # Python's own
    for handler in root.handlers:
        if handler.level == logging.ERROR:
            handler.setLevel(logging.NOTSET)
