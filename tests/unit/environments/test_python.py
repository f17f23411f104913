"""The verl tool `code_interpreter`, from its YAML, against a real sandbox, called as verl calls tools."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.tools.tool_registry import initialize_tools_from_config

from verl_ext.environments.python import CodeInterpreter, SandboxFailure
from verl_ext.sandbox import running_server

CONFIG = Path(__file__).parents[3] / "configs" / "tools" / "code_interpreter.yaml"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server(workers=2, options=("--preload", "")) as url:
        yield url


@pytest.fixture
async def tool(url, monkeypatch) -> AsyncIterator[CodeInterpreter]:
    monkeypatch.setenv("SANDBOX_URL", url)
    (tool,) = initialize_tools_from_config(CONFIG)
    yield tool
    await tool.client.aclose()  # the process shares it, but each test has its own event loop


def with_settings(tool: CodeInterpreter, **settings: object) -> CodeInterpreter:
    return CodeInterpreter(tool.config | settings, tool.tool_schema)


async def run(tool: CodeInterpreter, code: object, **kwargs: object) -> tuple[str, dict]:
    instance_id, _ = await tool.create()
    response, reward, metrics = await tool.execute(instance_id, {"code": code}, **kwargs)
    await tool.release(instance_id)
    assert reward == 0.0
    return response.text, metrics


def test_model_is_told_of_one_tool_with_one_argument(tool):
    schema = tool.get_openai_tool_schema().model_dump(exclude_unset=True)
    assert schema["function"]["name"] == "code_interpreter"
    assert (
        list(schema["function"]["parameters"]["properties"]) == schema["function"]["parameters"]["required"] == ["code"]
    )
    assert (tool.settings["timeout_s"], tool.settings["memory_limit_mb"]) == (30, 1024)  # of the published recipe


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        ("print(6 * 7)", "42", "ok"),
        ("```python\nprint(6 * 7)\n```", "42", "ok"),
        ("6 * 7", "(no output)", "ok"),  # as the model wrote it: nothing is printed for it
        ("import sys; print('out'); print('err', file=sys.stderr)", "out\nerr", "ok"),
        ("import os; os.kill(os.getpid(), 9)", "Killed by signal 9 (Killed)", "code_error"),
        ("import ctypes; ctypes.string_at(0)", "Killed by signal 11 (Segmentation fault)", "code_error"),
        ("import os; os.abort()", "Killed by signal 6 (Aborted)", "code_error"),
        ("import sys; sys.exit(3)", "Exited with code 3", "code_error"),
        ("exit(1)", "Exited with code 1", "code_error"),
        ("import os; os._exit(1)", "Exited with code 1", "code_error"),
        ("raise SystemExit(-1)", "Exited with code 255", "code_error"),
        ("print(7); quit(2)", "7\nExited with code 2", "code_error"),
        ("import sys; sys.exit('wrong input')", "wrong input", "code_error"),
        ("import sys; print('w', file=sys.stderr); exit(2)", "w [exited with code 2]", "code_error"),
        ("import sys; sys.exit(0)", "(no output)", "ok"),
        ("print(7); exit()", "7", "ok"),
    ],
)
async def test_code_runs_as_the_model_wrote_it(tool, code, text, status):
    said, metrics = await run(tool, code)
    assert (said, metrics["status"]) == (text, status)
    assert metrics["run_s"] > 0


async def test_settings_change_what_the_model_sees(tool):
    assert (await run(with_settings(tool, echo_last_expression=True), "6 * 7"))[0] == "42"
    said, _ = await run(with_settings(tool, traceback="last_line"), "print(1)\n1 / 0")
    assert said == "1\nZeroDivisionError: division by zero"
    said, metrics = await run(with_settings(tool, timeout_s=0.3), "print(1, flush=True)\nwhile True: pass")
    assert (said, metrics["status"]) == ("1\n\nTimeoutError: stopped after 0.3 s".replace("\n\n", "\n"), "timeout")
    said, _ = await run(with_settings(tool, memory_limit_mb=64), "bytearray(100 << 20)")
    assert said.endswith("MemoryError")


async def test_failure_of_the_sandbox_marks_the_rollout_and_is_no_answer(tool):
    broken = with_settings(tool, urls=["http://127.0.0.1:9"], queue_timeout_s=0.2, timeout_s=0.1)
    agent_data = SimpleNamespace(extra_fields={})
    with pytest.raises(SandboxFailure, match="127.0.0.1:9"):
        await run(broken, "print(1)", agent_data=agent_data)
    assert agent_data.extra_fields == {"finish_reason": "sandbox_failure"}  # read by the reward manager and the sampler


@pytest.mark.parametrize("code", [None, "", " \n", 7, ["print(1)"]])
async def test_call_without_code_says_what_is_missing(tool, code):
    with pytest.raises(ValueError, match="'code', a string with a program, got"):
        await run(tool, code)


@pytest.mark.parametrize("config", [{"type": "native"}, {"urls": []}, {"urls": ["http://127.0.0.1:9"], "timeout": 30}])
def test_unknown_or_missing_settings_raise(tool, config):
    with pytest.raises(ValueError, match="expected `urls`"):
        CodeInterpreter(config, OpenAIFunctionToolSchema.model_validate(tool.tool_schema.model_dump()))


def test_tools_with_the_same_settings_share_a_client(tool):
    assert with_settings(tool).client is tool.client
    assert with_settings(tool, timeout_s=1).client is tool.client  # not the client's
    assert with_settings(tool, max_concurrency=3).client is not tool.client
