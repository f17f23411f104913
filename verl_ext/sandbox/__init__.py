"""Code sandbox: an HTTP server that executes Python (`server`), its async client, and a way to start it (`launch`)."""

from verl_ext.sandbox.client import RunResult, SandboxClient
from verl_ext.sandbox.launch import SandboxNotReady, running_server

__all__ = ["RunResult", "SandboxClient", "SandboxNotReady", "running_server"]
