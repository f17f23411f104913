"""Who is to blame for a tool's exception: tools of verl's BaseTool and FunctionTool kinds, in the real loop."""

import asyncio
import errno
import http.client
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import httpx
import pytest
import requests

from verl_ext.environments import toolbox
from verl_ext.environments.tool_errors import ToolError, ToolUnavailable, who_is_at_fault

SCHEMA = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string", "description": "what"}},
            "required": ["what"],
        },
    },
}


def function_tool(fn):
    from verl.tools.function_tool import FunctionTool
    from verl.tools.schemas import OpenAIFunctionToolSchema

    return FunctionTool("look_up", fn, OpenAIFunctionToolSchema.model_validate(SCHEMA))


def base_tool(fn):
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

    class LookUp(BaseTool):
        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(text=fn(**parameters)), 0.0, {}

    return LookUp({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))


def fails(error):
    def fn(what):
        raise error

    return fn


WHOLE = """
from verl.tools.function_tool import function_tool

@function_tool
def pick(things: list[str], weights: dict[str, int], most: int | None = None) -> str:
    '''Pick.

    Args:
        things: the things.
        weights: of each.
        most: at most so many.

    Returns:
        what it picks.
    '''
    return str(most)
"""


def test_the_schema_of_a_tool_is_as_whole_in_a_rollout_as_in_a_trace(tmp_path):
    """verl's own class keeps of an argument its type, description and enum, and drops the rest without a word."""
    from transformers.utils import get_json_schema

    from verl_ext.protocols.tool_schemas import schemas_of

    nested = {"type": "object", "description": "d", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    written = {"name": "nest", "description": "n", "parameters": {"type": "object", "properties": {"a": nested}}}
    (tmp_path / "functions.py").write_text(WHOLE)
    tool = {"class_name": "verl.tools.base_tool.BaseTool", "config": {"type": "native"}}
    tool["tool_schema"] = {"type": "function", "function": written}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [tool]}))
    files = {"tool_config_path": "tools.yaml", "function_tool_path": "functions.py"}
    tools = toolbox.load_tools(files, tmp_path)
    shown = toolbox.schemas_of(tools)
    picked = schemas_of([get_json_schema(tools[1].fn)])
    assert json.dumps(shown["nest"]["function"]) == json.dumps(written)
    assert json.dumps(shown["pick"]) == json.dumps(picked["pick"]) and "return" not in shown["pick"]["function"]
    assert shown["pick"]["function"]["parameters"]["properties"]["things"]["items"] == {"type": "string"}


def test_a_trace_gets_the_schemas_of_a_file_by_one_call(tmp_path):
    file = tmp_path / "functions.py"
    file.write_text(WHOLE.replace("def pick(", "def pick_for_a_trace("))
    code, picked = toolbox.schemas_of_file(file)
    assert code["function"]["name"] == "code_interpreter" and picked["function"]["name"] == "pick_for_a_trace"
    assert picked["function"]["parameters"]["properties"]["things"]["items"] == {"type": "string"}


@pytest.mark.nightly  # importing vLLM and Ray takes 10 s
def test_a_worker_keeps_schemas_whole_before_it_loads_tools():
    code = (
        "import verl_ext.rollout.workers\nfrom verl.tools.schemas import OpenAIFunctionPropertySchema as Schema\n"
        "print(Schema.model_validate({'type': 'array', 'items': {}}).model_dump(exclude_unset=True))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "{'type': 'array', 'items': {}}"


@pytest.fixture
def call(roll_out, tokenizer, monkeypatch):
    """Roll out one call of a tool that runs `fn`; returns the episode, its text, and the calls of `fn`."""
    monkeypatch.setattr(toolbox, "TOOL_BACKOFF_S", 0.001)

    def call(fn, what="x", make=function_tool, sandbox=None, **more):
        calls = []

        def counted(**arguments):
            calls.append(arguments)
            return fn(**arguments)

        text = json.dumps({"name": "look_up", "arguments": {"what": what} | more})
        turns = [f"<tool_call>{text}</tool_call>", "\\boxed{2}"]
        ids = [tokenizer.encode(turn, add_special_tokens=False) + [tokenizer.eos_token_id] for turn in turns]
        settings = {"protocol": "hermes", "response_length": 900, "max_tool_response_tokens": 300}
        settings |= {"sandbox": sandbox} if sandbox else {}
        episode, *_ = roll_out(tokenizer, ids, tools=[make(counted)], **settings)
        return episode, tokenizer.decode(episode.row.ids), calls

    return call


@pytest.mark.parametrize("make", [function_tool, base_tool])
def test_the_error_that_a_tool_declares_is_told_to_the_model(call, make):
    episode, text, calls = call(fails(ToolError("there is no city 'Atlantis'")), make=make)
    assert episode.finish_reason == "answer" and len(calls) == 1
    assert episode.use.errors == {"ToolError": 1}
    assert "<|im_start|>tool\nToolError: there is no city 'Atlantis'<|im_end|>" in text


@pytest.mark.parametrize(("what", "end"), [("x", "sandbox_failure"), ("http://127.0.0.1:1/page", "answer")])
def test_a_tool_that_hangs_holds_no_rollout_and_a_url_of_the_model_makes_it_its_error(call, what, end):
    limits = {"timeout_s": 0.1, "queue_timeout_s": 0.1}
    episode, _, calls = call(lambda what: str(time.sleep(2)), what, sandbox=limits)  # asyncio.run waits for threads
    assert episode.finish_reason == end and len(calls) == 3


@pytest.mark.parametrize("make", [function_tool, base_tool])
@pytest.mark.parametrize(
    "bug",
    [
        lambda what: {"answer": 1}["result"],  # the backend's answer has no such key
        lambda what: {"answer": None}["answer"]["result"],
        lambda what: json.loads("<html>502 Bad Gateway</html>")["result"],
        lambda what: [][0],
        lambda what: 1 / 0,
        lambda what: int("twelve"),
        lambda what: what.answer,
        lambda what: Path("/no/such/folder/of/the/tool.json").read_text(),
        fails(FileNotFoundError("no data")),
        fails(PermissionError(errno.EACCES, "Permission denied", "/etc/shadow")),
        lambda what: None,
        fails(SystemExit(2)),
    ],
    ids=[
        "KeyError",
        "TypeError",
        "JSON",
        "IndexError",
        "division",
        "ValueError",
        "AttributeError",
        "own file",
        "no file",
        "no right",
        "None",
        "exit",
    ],
)
def test_any_other_exception_is_a_bug_and_raised_with_the_tools_name(call, make, bug):
    with pytest.raises(Exception, match="look_up"):
        call(bug, make=make)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("gone"),
        TimeoutError("no answer"),
        socket.gaierror(-2, "Name or service not known"),
        ssl.SSLError("handshake"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        OSError(errno.EMFILE, "Too many open files", "/etc/hosts"),
        OSError(errno.EMFILE, "Too many open files", "/data/x"),  # x: the call's argument
        OSError(errno.ENOSPC, "No space left on device", "/data/x.csv"),
        http.client.RemoteDisconnected("closed"),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ContentTypeError(None, (), status=200, message="unexpected mimetype: text/html"),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("no answer"),
        requests.ConnectionError("refused"),
        requests.JSONDecodeError("Expecting value", "<html>", 0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_a_connection_is_tried_again_and_then_marks_the_sample(call, error):
    episode, text, calls = call(fails(error))
    assert episode.finish_reason == "sandbox_failure" and episode.use.errors == {}
    assert len(calls) == toolbox.TOOL_ATTEMPTS and "<|im_start|>tool" not in text


def test_a_tool_that_says_it_is_unavailable_is_not_tried_again(call):
    episode, _, calls = call(fails(ToolUnavailable("no answer in 30 s")))
    assert episode.finish_reason == "sandbox_failure" and len(calls) == 1


def test_a_call_that_succeeds_after_all_is_an_ordinary_call(call):
    answers = iter([ConnectionResetError("gone"), TimeoutError(), None])

    def fn(what):
        if (error := next(answers)) is not None:
            raise error
        return "7"

    episode, text, calls = call(fn)
    assert episode.use.ok == 1 and len(calls) == 3 and "<|im_start|>tool\n7<|im_end|>" in text


@pytest.mark.parametrize("make", [function_tool, base_tool])
@pytest.mark.parametrize(
    "what",
    [
        "no_such.csv",
        "../no_such.csv",
        "/etc/passwd/no_such.csv",
        "no_such",
        "folder",
        "a" * 300,
        "",
        ".",
        "..",
        "a/",
        "/",
    ],
)
def test_a_file_that_the_model_named_and_that_cannot_be_read_is_its_own_error(call, make, what, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.csv").mkdir()

    def fn(what):
        name = what if what.endswith(".csv") else f"{what}.csv"
        return (tmp_path / name).read_text()

    episode, text, calls = call(fn, what, make)
    assert episode.finish_reason == "answer" and len(calls) == 1
    assert sum(episode.use.errors.values()) == 1 and "<|im_start|>tool\n" in text


def test_a_device_that_the_model_named_and_that_cannot_be_read_is_its_own_error(call):
    def fn(what):
        raise OSError(errno.EIO, "Input/output error", what)

    episode, _, calls = call(fn, "/dev/ttyS0")
    assert episode.finish_reason == "answer" and len(calls) == 1, "exclusion would be for sale"


@pytest.mark.parametrize("make", [function_tool, base_tool])
def test_an_argument_that_the_schema_does_not_have_is_the_models_error(call, make):
    episode, text, calls = call(lambda what: "7", make=make, colour="red")
    assert calls == [] and episode.use.errors == {"ToolError": 1}
    assert "ToolError: look_up has no argument 'colour'; it has what" in text


def test_a_path_that_cannot_be_encoded_never_reaches_the_tool(call):
    for what in ("a\0b", "a\ud800"):
        episode, _, calls = call(lambda what: Path(what).read_text(), what)
        assert calls == [] and episode.use.malformed == {"bad_json": 1}


@pytest.fixture
def backend() -> Iterator[tuple[str, dict]]:
    """A server that answers as `answer` says: status, type and body."""
    answer = {"status": 200, "type": "application/json", "body": b'{"result": "7"}'}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer["status"])
            self.send_header("Content-Type", answer["type"])
            self.send_header("Content-Length", str(len(answer["body"])))
            self.end_headers()
            self.wfile.write(answer["body"])

        def log_message(self, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answer
    server.shutdown()
    server.server_close()


def by_httpx(url):
    return httpx.get(url).raise_for_status().json()["result"]


def by_requests(url):
    answer = requests.get(url)
    answer.raise_for_status()
    return answer.json()["result"]


def by_urllib(url):
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)["result"]


@pytest.mark.parametrize("get", [by_httpx, by_requests, by_urllib])
def test_what_a_backend_answers_is_never_the_models_error(call, backend, get):
    url, answer = backend
    episode, text, _ = call(lambda what: get(url))
    assert episode.use.ok == 1 and "<|im_start|>tool\n7<|im_end|>" in text

    page = {"type": "text/html", "body": b"<html>502 Bad Gateway</html>"}
    answer.update(page, status=502)
    episode, _, calls = call(lambda what: get(url))
    assert episode.finish_reason == "sandbox_failure" and len(calls) == 3

    answer.update(status=404)  # the tool asks for what is not there: only it can know whether the model is to blame
    with pytest.raises(Exception, match="look_up"):
        call(lambda what: get(url))

    answer.update(status=200, type="application/json", body=b'{"error": null}')
    with pytest.raises(KeyError, match="look_up"):
        call(lambda what: get(url))


@pytest.mark.parametrize("what", ["", ".", "folder"])
def test_a_folder_that_the_model_named_for_a_file_is_its_own_error(call, what, tmp_path):
    (tmp_path / "folder").mkdir()
    episode, *_ = call(lambda what: (tmp_path / what).read_text(), what)
    assert episode.finish_reason == "answer" and sum(episode.use.errors.values()) == 1


@pytest.mark.parametrize("get", [by_httpx, by_requests, by_urllib])
def test_an_address_that_the_model_named_and_that_does_not_answer_is_its_own_error(call, get):
    with socket.socket() as bound:  # and not listening: no other server gets its port meanwhile
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        episode, *_ = call(lambda what: get(what), f"{url}/page")
        assert episode.finish_reason == "answer" and sum(episode.use.errors.values()) == 1
        episode, *_ = call(lambda what: get(url), "what is the weather?")
        assert episode.finish_reason == "sandbox_failure"


@pytest.mark.parametrize("status", [404, 403, 429, 500])
@pytest.mark.parametrize("get", [by_httpx, by_requests, by_urllib])
def test_a_page_that_the_model_named_and_that_is_refused_is_its_own_error(call, backend, get, status):
    """Otherwise the address of a missing page would take a whole group out of training: exclusion would be for sale."""
    url, answer = backend
    answer.update(status=status, type="text/html", body=b"<html></html>")
    episode, *_ = call(lambda what: get(what), f"{url}/no-such-page")
    assert episode.finish_reason == "answer" and sum(episode.use.errors.values()) == 1


def test_aiohttp_names_its_host() -> None:
    class Key:
        host, port, ssl = "no-such-host.invalid", 80, None

    error = aiohttp.ClientConnectorError(Key(), OSError(errno.ECONNREFUSED, "refused"))
    assert who_is_at_fault(error, {"url": "http://no-such-host.invalid/page"}) == "model"
    assert who_is_at_fault(error, {"host": "no-such-host.invalid"}) == "model"
    assert who_is_at_fault(error, {"query": "who runs example.org?"}) == "infrastructure"
    assert who_is_at_fault(error, {"service": "no-such-host"}) == "infrastructure"
    assert who_is_at_fault(TimeoutError(), {"url": "http://no-such-host.invalid/page"}) == "model"
    passes = who_is_at_fault(TimeoutError(), {"url": "http://no-such-host.invalid/page"}, is_last=False)
    assert passes == "infrastructure", "the tool's own backend may have been restarted"
    assert who_is_at_fault(TimeoutError(), {"query": "who runs example.org?"}) == "infrastructure"
    full = OSError(errno.EMFILE, "Too many open files")
    for each in (full, urllib.error.URLError(full)):
        assert who_is_at_fault(each, {"url": "http://no-such-host.invalid/page"}) == "infrastructure"
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/index.db")
    assert who_is_at_fault(missing, {"query": "", "url": "https://example.org/"}) == "ours"
    there = FileExistsError(errno.EEXIST, "File exists", "/data/")
    assert who_is_at_fault(there, {"name": ""}) == "model"
    for argument in ("x", "x/page"):
        Key.host = "x"
        error = aiohttp.ClientConnectorError(Key(), OSError(errno.ECONNREFUSED, "refused"))
        assert who_is_at_fault(error, {"url": argument}) == who_is_at_fault(error, {"host": argument}) == "model"
    assert who_is_at_fault(error, {"query": "x"}) == "infrastructure", "a backend may be called so"
    assert who_is_at_fault(TimeoutError(), {"address": "10 Downing Street", "security": "AAPL"}) == "infrastructure"
    own = PermissionError(errno.EACCES, "Permission denied", "/var/lib/tool/index.db")
    assert who_is_at_fault(own, {"query": "x", "filter": ""}) == "ours"
    assert who_is_at_fault(aiohttp.InvalidURL("nonsense"), {"url": "nonsense"}) == "ours"


def test_a_tool_that_does_not_let_go_keeps_its_answer(call, monkeypatch):
    async def release(self, instance_id, **kwargs):
        await asyncio.sleep(20)

    def slow(fn):
        tool = base_tool(fn)
        monkeypatch.setattr(type(tool), "release", release)
        return tool

    monkeypatch.setattr(toolbox, "RELEASE_S", 0.05)
    episode, text, calls = call(lambda what: "7", make=slow)
    assert len(calls) == 1 and episode.use.ok == 1 and "<|im_start|>tool\n7<|im_end|>" in text


def test_the_sandboxs_own_tool_says_whose_error_it_is() -> None:
    from verl_ext.environments.python import SandboxFailure

    assert who_is_at_fault(SandboxFailure("down"), {"code": "1"}) == "infrastructure"
