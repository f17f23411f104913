"""A run's messages still appear when vLLM is imported after verl, as happens without warm_python."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import logging
import verl_ext
logging.basicConfig()
import model_hosting_container_standards.logging_config
ours = logging.getLogger("verl_ext.any")
ours.setLevel(logging.INFO)
ours.info("a sandbox answers again")
logging.getLogger("verl.any").warning("a tool failed")
logging.getLogger("other").info("a request")
"""


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ["INFO:verl_ext.any:a sandbox answers again", "WARNING:verl.any:a tool failed"]),
        ({"LOG_LEVEL": "ERROR"}, []),  # the user's own wish
    ],
)
def test_a_warning_is_logged(variables, said):
    pytest.importorskip("model_hosting_container_standards", reason="a dependency of vLLM, which is not installed")
    env = {name: value for name, value in os.environ.items() if not name.endswith("LOG_LEVEL")} | variables
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == said
