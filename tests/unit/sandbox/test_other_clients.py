"""Clients written for SandboxFusion, unchanged: its own from PyPI, verl's, and curl."""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import sandbox_fusion
from sandbox_fusion import CommandRunStatus, RunCodeRequest, RunStatus
from verl.utils.reward_score.sandbox_fusion.utils import call_sandbox_api, check_correctness

from tests.unit.sandbox.server_process import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--preload", "", workers=1)
    yield server
    server.stop()


PROGRAMS = [
    ("print('é')", RunStatus.Success, CommandRunStatus.Finished, 0, "é\n"),
    ("print(1); 1 / 0", RunStatus.Failed, CommandRunStatus.Finished, 1, "1\n"),
    ("print(1, flush=True)\nwhile True: pass", RunStatus.Failed, CommandRunStatus.TimeLimitExceeded, None, "1\n"),
]


@pytest.mark.parametrize(("code", "status", "run_status", "return_code", "stdout"), PROGRAMS)
def test_sandbox_fusion_from_pypi(server, code, status, run_status, return_code, stdout):
    request = RunCodeRequest(code=code, language="python", run_timeout=1.5 if return_code is None else 10)
    response = sandbox_fusion.run_code(request, endpoint=server.url, max_attempts=1)
    assert (response.status, response.run_result.status) == (status, run_status)
    assert (response.run_result.return_code, response.run_result.stdout) == (return_code, stdout)
    assert response.run_result.execution_time > 0


async def test_sandbox_fusion_from_pypi_asynchronously_with_files(server):
    request = RunCodeRequest(
        code="open('out', 'w').write(open('in').read() + input())",
        language="python",
        stdin="b\n",
        files={"in": base64.b64encode(b"a").decode()},
        fetch_files=["out"],
    )
    response = await sandbox_fusion.run_code_async(request, endpoint=server.url, max_attempts=1)
    assert {name: base64.b64decode(content) for name, content in response.files.items()} == {"out": b"ab"}


def test_sandbox_fusion_from_pypi_reports_another_language_as_an_error(server):
    request = RunCodeRequest(code="", language="cpp")
    with pytest.raises(Exception, match="code 422.*python"):
        sandbox_fusion.run_code(request, endpoint=server.url, max_attempts=1)


@pytest.mark.parametrize(("code", "status", "run_status", "return_code", "stdout"), PROGRAMS)
def test_verls_client(server, code, status, run_status, return_code, stdout):
    run_timeout = 2 if return_code is None else 10
    answer, error = call_sandbox_api(f"{server.url}/run_code", code, None, 5, run_timeout, 256)
    assert error is None
    assert (answer["status"], answer["run_result"]["status"]) == (status.value, run_status.value)
    assert (answer["run_result"]["return_code"], answer["run_result"]["stdout"]) == (return_code, stdout)


def test_verls_check_of_test_cases(server):
    cases = {"inputs": ["3\n", "4\n", "5\n"], "outputs": ["9\n", "16\n", "26\n"]}
    results, details = check_correctness(f"{server.url}/run_code", cases, "print(int(input()) ** 2)", timeout=5)
    assert results == [True, True, False]
    assert [detail["status"] for detail in details] == ["success", "success", "wrong_answer"]


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_verls_client_retries_where_the_server_is_overloaded(server, monkeypatch):
    """One worker, and a request that must be answered 504 at first: verl asks again, and gets its answer."""
    monkeypatch.setattr("verl.utils.reward_score.sandbox_fusion.utils.INITIAL_RETRY_DELAY", 0.1)
    body = json.dumps({"code": "import time; time.sleep(6)", "language": "python", "run_timeout": 8}).encode()
    command = ["curl", "-s", f"{server.url}/run_code", "-H", "content-type: application/json", "-d", body.decode()]
    busy = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    answer, error = call_sandbox_api(f"{server.url}/run_code", "print(1)", None, 0, 1, 256)  # waits 0 + 5 s
    assert busy.wait(timeout=20) == 0
    assert error is None
    assert answer["run_result"]["stdout"] == "1\n"


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_as_in_the_readme_of_sandbox_fusion(server):
    body = '{"code": "print(\\"Hello, world!\\")", "language": "python"}'
    command = ["curl", "-s", f"{server.url}/run_code", "-H", "Content-Type: application/json", "--data-raw", body]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout)
    assert answer["status"] == "Success"
    assert answer["run_result"]["stdout"] == "Hello, world!\n"
