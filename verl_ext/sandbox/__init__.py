"""The code sandbox, which needs nothing from training: `pip install .` installs only the sandbox.

`server/` executes Python and isolates it, `client.py` is its asynchronous client, `launch.py` starts a server for the
length of a block, `probe.py` checks whether one works.
In: Python code. Out: a `RunResult`: what the code printed and how it ended, or that the sandbox failed.
"""

from verl_ext.sandbox.box import Box, BoxUnavailable, Sealed
from verl_ext.sandbox.client import RunResult, SandboxClient
from verl_ext.sandbox.launch import SandboxNotReady, running_server

__all__ = ["Box", "BoxUnavailable", "RunResult", "SandboxClient", "SandboxNotReady", "Sealed", "running_server"]
