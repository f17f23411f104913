"""The code sandbox, which needs nothing of training: `pip install .` installs it alone.

`server/` executes Python and isolates it, `client.py` is its asynchronous client, `launch.py` starts a server for the
length of a block, `probe.py` looks whether one works. `shared.py` gives the one client of a process, `rate_limit.py`
the limit of all processes together.
In: Python code. Out: a `RunResult`: what the code printed and how it ended, or that the sandbox failed.
"""

from verl_ext.sandbox.client import RunResult, SandboxClient
from verl_ext.sandbox.launch import SandboxNotReady, running_server

__all__ = ["RunResult", "SandboxClient", "SandboxNotReady", "running_server"]
