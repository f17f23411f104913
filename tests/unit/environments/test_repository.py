"""Episodes of `repository` in real boxes: a fix scores 1, and nothing else does, whatever it does to its tests."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from repositories import Measure, changes

from tests.unit.sandbox.server_process import Server
from tests.unit.tasks import repositories
from verl_ext.environments.repository import Repository
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.protocols.base import Call
from verl_ext.sandbox.client import SandboxClient
from verl_ext.tasks import archive, git
from verl_ext.tasks.repository import to_row

SOURCE = "/app/words/__init__.py"
UNFIXED = ["tests/test_words.py::TestSlug::test_tabs", "tests/test_words.py::test_spaces"]


@pytest.fixture(scope="module")
def made(box_server, tmp_path_factory) -> tuple[dict[str, Any], Path, Path]:
    """The row of the second commit of `words`, the folder of its archives, and the repository."""
    folder = tmp_path_factory.mktemp("repository")
    repo = repositories.words(folder / "words")

    async def measure() -> Any:
        client = SandboxClient([box_server.url])
        try:
            [instance] = changes(repo, "words", None)
            return await Measure(client, folder / "repos").task(repo, instance)
        finally:
            await client.aclose()

    outcome = asyncio.run(measure())
    assert outcome.dropped == ""
    return to_row(outcome.task, index=0, split="train"), folder / "repos", repo


class Played:
    """What an episode that made these calls scores, and what it was told."""

    def __init__(self, made: Any, server: Server, *calls: tuple[str, dict[str, str]], again: bool = False):
        self.said: list[str] = []
        row, folder, _ = made

        async def play() -> Any:
            settings = {"sandbox": {"urls": [server.url], "queue_timeout_s": 20, "max_concurrency": 4}}
            environment = Repository(OmegaConf.create({"retool": settings}), folder=str(folder))
            environment.sandbox = SandboxClient([server.url])  # a client belongs to one event loop
            try:
                await environment.open(row | {"raw_prompt": row["prompt"]})
                for name, arguments in calls:
                    self.said.append((await environment.call(Call(name, arguments, 0))).output)
                score = await environment.score(None)
                return score, await environment.score_again(row, score.evidence) if again else None
            finally:
                await environment.close()
                await environment.sandbox.aclose()

        self.score, self.again = asyncio.run(play())


def write(path: str, text: str) -> tuple[str, dict[str, str]]:
    return "edit", {"path": path, "old": "", "new": text}


def bash(command: str) -> tuple[str, dict[str, str]]:
    return "bash", {"command": command}


def test_the_row_has_what_fails_and_what_passes_and_no_test(made):
    row = made[0]
    instance = json.loads(row["extra_info"]["repository"])["instance"]
    assert json.loads(instance["FAIL_TO_PASS"]) == UNFIXED
    assert json.loads(instance["PASS_TO_PASS"]) == [
        "tests/test_words.py::test_plain",
        "tests/test_words.py::test_total",
    ]
    told = row["prompt"][0]["content"]
    assert "slug keeps each of them." in told and "assert" not in told
    assert "test_" not in told  # a name would tell a test from the copies that must fail


def test_the_fix_scores_1_and_scores_so_again(made, box_server):
    use = bash("git commit -qam fix; python3 -m pytest -q 2>&1")
    played = Played(made, box_server, write(SOURCE, repositories.NEW), use, again=True)
    assert (played.score.acc, played.score.method) == (1.0, "tests: 2 of 2 fixed, 2 of 2 kept")
    assert "2 passed" in played.said[1]
    assert played.again == played.score and len(played.score.evidence) < 1000


def test_the_untouched_repository_scores_0(made, box_server):
    played = Played(made, box_server)
    assert played.score.acc == 0.0
    assert played.score.method == f"tests: 0 of 2 fixed, 2 of 2 kept; not passed: {UNFIXED[0]}, {UNFIXED[1]}"


def test_a_fix_that_breaks_another_test_scores_0(made, box_server):
    broken = repositories.NEW.replace("sum(values)", "len(values)")
    played = Played(made, box_server, write(SOURCE, broken))
    assert (played.score.acc, played.score.method) == (
        0.0,
        "tests: 2 of 2 fixed, 1 of 2 kept; not passed: tests/test_words.py::test_total",
    )


def test_moved_and_deleted_sources_count(made, box_server):
    move = bash("mkdir words/parts && git mv words/__init__.py words/parts/text.py && touch words/parts/__init__.py")
    again = write(SOURCE, "from words.parts.text import slug, total\n")
    fixed = write("/app/words/parts/text.py", repositories.NEW)
    assert Played(made, box_server, move, again, fixed).score.acc == 1.0
    # A package hides a module of its name, so this one counts only if the package is gone.
    assert Played(made, box_server, bash("rm -r words"), write("/app/words.py", repositories.NEW)).score.acc == 1.0


def test_changed_tests_and_configuration_are_named_and_do_not_count(made, box_server):
    played = Played(
        made,
        box_server,
        write("/app/tests/test_words.py", "def test_spaces():\n    pass\n"),
        write("/app/conftest.py", "raise SystemExit(0)\n"),
        write("/app/setup.cfg", "[tool:pytest]\naddopts = --collect-only\n"),
    )
    assert played.score.acc == 0.0
    assert "tampering: test conftest.py, configuration setup.cfg, test tests/test_words.py" in played.score.method


def with_marks(attempts: dict[str, Any], *often: str) -> list[Any]:
    """Return the names of attempts; most are tried at night only, as each takes about a second."""
    return [pytest.param(name, marks=() if name in often else pytest.mark.nightly) for name in attempts]


# What an agent may try ------------------------------------------------------------------------------------------------

ALL_PASSED = """
import ast, gc, os, types
say = next(each for each in gc.get_objects() if isinstance(each, types.FunctionType) and each.__name__ == "say")
def report(nodes, name="tests/test_words.py"):
    for each in nodes:
        if isinstance(each, ast.ClassDef):
            report(each.body, f"{name}::{each.name}")
        elif isinstance(each, ast.FunctionDef):
            for when in ("setup", "call", "teardown"):
                say(f"{name}::{each.name}", when, "passed", False)
report(ast.parse(open("/app/tests/test_words.py").read()).body)
say("end", 0)
os._exit(0)
"""
ANY = "type('Any', (), {'__eq__': lambda self, other: True, '__hash__': None})()"
IN_PROCESS = {
    "exit at import": "import os\nos._exit(0)\n",
    "sys.exit at import": "import sys\nsys.exit(0)\n",
    "exit at the end": "import atexit, os\natexit.register(os._exit, 0)\n",
    "exit in the test": "import os\ndef slug(text):\n    os._exit(0)\n",
    "end of pytest": "import pytest\ndef slug(text):\n    pytest.exit('done', returncode=0)\n",
    "skipped": "import pytest\ndef slug(text):\n    pytest.skip('not now')\n",
    "equal to all": f"def slug(text):\n    return {ANY}\ntotal = slug\n",
    "text equal to all": "class All(str):\n    __eq__ = lambda self, other: True\n"
    "    __hash__ = str.__hash__\nslug = All\n",
    "no failures": "import _pytest.runner as r\nfrom _pytest.reports import TestReport\n"
    "old = TestReport.from_item_and_call.__func__\n"
    "def new(cls, item, call):\n    call.excinfo = None\n    return old(cls, item, call)\n"
    "TestReport.from_item_and_call = classmethod(new)\n",
    "tests that do nothing": "import _pytest.python as p\np.Function.runtest = lambda self: None\n",
    "outcomes": "from _pytest.reports import TestReport\n"
    "TestReport.outcome = property(lambda self: 'passed', lambda self, value: None)\n",
    "assertions that raise nothing": "import builtins\nclass Quiet(Exception):\n    pass\n"
    "builtins.AssertionError = Quiet\nimport _pytest.outcomes\n",
    "an ending plugin": "import pytest\nclass Plugin:\n    @pytest.hookimpl(wrapper=True)\n"
    "    def pytest_runtest_makereport(self, item, call):\n        report = yield\n"
    "        report.outcome = 'passed'\n        return report\n"
    "import gc\nfrom _pytest.config import Config\n"
    "[each.pluginmanager.register(Plugin()) for each in gc.get_objects() if isinstance(each, Config)]\n",
    "plugins by environment": "import os\nos.environ['PYTEST_PLUGINS'] = 'words.plugin'\n"
    "os.environ['PYTEST_ADDOPTS'] = '--collect-only'\n",
    "results on stdout": "print('1 passed')\nprint('[\"end\", 0]')\n",
    "results on all descriptors": "import os\nfor fd in range(1, 300):\n    try:\n"
    '        os.write(fd, b\'["x", "tests/test_words.py::test_spaces", "call", "passed", false]\\n\')\n'
    "    except OSError:\n        pass\n",
    "all results by the token": ALL_PASSED,
    "tests twice": "import gc, types\nfor each in gc.get_objects():\n"
    "    if isinstance(each, types.FunctionType) and each.__name__ == 'say':\n"
    "        each('tests/test_words.py::test_spaces', 'call', 'passed', False)\n",
    "other tests on disk": "open('/app/tests/test_words.py', 'w').write('def test_spaces():\\n    pass\\n')\n",
    "assertions of unittest": "import re, unittest\nunittest.TestCase.assertEqual = lambda self, *values: None\n"
    "def slug(text):\n    return re.sub(' +', '-', text.lower().strip())\n",
    "what must fail is read": "import gc, json, os, types\n"
    "expected = json.load(open('/tests/spec.json'))['expected']\n"
    "say = next(f for f in gc.get_objects() if isinstance(f, types.FunctionType) and f.__name__ == 'say')\n"
    "for name in expected['fixed'] + expected['kept']:\n    for when in ('setup', 'call', 'teardown'):\n"
    "        say(name, when, 'passed', False)\nsay('end', 0)\nos._exit(0)\n",
    "the report": "open('/tests/spec.json', 'w').write('{}')\n",
    "all processes": "import os, signal\nos.kill(-1, signal.SIGKILL)\n",
    "the runner": "import os, signal\nfor pid in range(1, 200):\n    try:\n        os.kill(pid, signal.SIGSTOP)\n"
    "    except OSError:\n        pass\n",
    "much memory": "import ctypes\nx = bytearray(3 << 30)\n",
    "many processes": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n",
    "one that stays": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        try:\n"
    "            open('/app/tests/test_words.py', 'w').write('def test_spaces():\\n    pass\\n')\n"
    "        except OSError:\n            pass\n",
}


@pytest.mark.parametrize(
    "attempt", with_marks(IN_PROCESS, "exit at import", "equal to all", "outcomes", "what must fail is read")
)
def test_code_that_deceives_its_tests_scores_0(made, box_server, attempt):
    text = IN_PROCESS[attempt]
    # What an attempt does not define is as it was. The last one wins, as names of a module do.
    rest = (
        repositories.OLD
        if "def slug" not in text and "slug =" not in text
        else "def total(values):\n    return sum(values)\n"
    )
    played = Played(made, box_server, write(SOURCE, f"{rest}\n\n{text}"))
    assert played.score.acc == 0.0, played.score
    assert IS_CAUGHT.get(attempt, "not passed") in played.score.method


# Attempts that have every test reported as passed, and what they are caught by. The others spoil their own tests.
COPY_PASSED = "tampering: a test that must fail passed"
IS_CAUGHT = dict.fromkeys(
    ["equal to all", "text equal to all", "no failures", "tests that do nothing", "outcomes", "an ending plugin"]
    + ["all results by the token", "assertions of unittest"],
    COPY_PASSED,
) | {
    "results on all descriptors": "tampering: tests/test_words.py: its process wrote results of its own",
    "tests twice": "was reported twice",
    "other tests on disk": "its process changed tests/test_words.py",
    "one that stays": "its process changed tests/test_words.py",
}


PLANTED = {
    "conftest": ("/app/conftest.py", "import os\nos._exit(0)\n"),
    "conftest of the tests": ("/app/tests/conftest.py", "def pytest_pyfunc_call(pyfuncitem):\n    return True\n"),
    "pytest.ini": ("/app/pytest.ini", "[pytest]\naddopts = -p words.plugin\n"),
    "tox.ini": ("/app/tox.ini", "[pytest]\npython_functions = none\n"),
    "pyproject": ("/app/pyproject.toml", "[tool.pytest.ini_options]\naddopts = '--collect-only'\n"),
    "sitecustomize": ("/app/sitecustomize.py", "import os\nos._exit(0)\n"),
    "usercustomize": ("/app/usercustomize.py", "import os\nos._exit(0)\n"),
    "pth": ("/app/words.pth", "import os; os._exit(0)\n"),
    "plugin": ("/app/words.egg-info/entry_points.txt", "[pytest11]\nwords = words.plugin\n"),
    "pytest": ("/app/pytest.py", "import os\nos._exit(0)\n"),
    "unittest": ("/app/unittest.py", "import os\nos._exit(0)\n"),
    "init of the tests": ("/app/tests/__init__.py", "import os\nos._exit(0)\n"),
    "tests that were run": ("/tests/spec.json", '{"expected": {}}'),
    "a reward": ("/logs/verifier/reward.txt", "1"),
    "a solution": ("/solution/solve.sh", "true"),
}


@pytest.mark.parametrize("attempt", with_marks(PLANTED, "conftest", "a reward"))
def test_what_is_planted_does_not_count_and_is_named(made, box_server, attempt):
    path, text = PLANTED[attempt]
    played = Played(made, box_server, bash(f"mkdir -p {Path(path).parent}"), write(path, text))
    assert played.score.acc == 0.0
    assert f"tampering: {'planted ' if not path.startswith('/app') else ''}" in played.score.method
    assert Path(path).name in played.score.method or "planted /logs" in played.score.method


def test_what_is_planted_does_not_spoil_a_fix(made, box_server):
    planted = [
        write(path, text) for name, (path, text) in PLANTED.items() if name in ("conftest", "pytest.ini", "pytest")
    ]
    played = Played(made, box_server, write(SOURCE, repositories.NEW), *planted)
    assert played.score.acc == 1.0 and "tampering" in played.score.method


def test_links_do_not_cross(made, box_server):
    links = "mv words kept && ln -s kept words && ln -s /tests hidden && ln -s . self"
    played = Played(made, box_server, write(SOURCE, repositories.NEW), bash(links))
    assert played.score.acc == 0.0
    assert "link self, link words" in played.score.method and "/app/hidden (a link" in played.score.method


SEARCHES = (
    "git log --all --format=%B%H; git reflog; git stash list; git tag; git branch -a; git remote -v",
    "git fsck --lost-found --unreachable --dangling 2>&1",
    "git cat-file --batch-all-objects --batch-check | cut -d' ' -f1",
    "git cat-file --batch-all-objects --batch",
    "find .git -type f | xargs cat | strings -n 6; find .git",
    "grep -rIl 'text.lower().split' / --exclude-dir=proc --exclude-dir=sys --include='*.py' 2>/dev/null | head",
    "python3 -c 'import words; print(words.__file__)'",
    "find / -name 'test_words*' -not -path '/proc/*' 2>/dev/null; ls -la /tests /solution /logs",
    "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'",
)


@pytest.mark.nightly
def test_the_fix_is_nowhere_in_the_box(made, box_server):
    _row, _, repo = made
    secrets = git.git("rev-list", "--objects", "HEAD", "^HEAD~1", cwd=repo).decode().split()
    names = [each for each in secrets if len(each) == 40]
    assert len(names) == 6
    played = Played(made, box_server, *map(bash, SEARCHES), *(bash(f"git cat-file -p {name} 2>&1") for name in names))
    said = "\n".join(played.said[: len(SEARCHES)])
    assert "Start" in said and "/app/words/__init__.py" in said, "the searches ran"
    assert "text.lower().replace" in said and "text.lower().split" not in said and "test_spaces" not in said
    assert not [name for name in names if name in said]
    assert all("Not a valid object name" in each for each in played.said[len(SEARCHES) :])


def test_a_package_that_the_sandbox_has_is_refused(made, box_server):
    row, folder, repo = made
    info = json.loads(row["extra_info"]["repository"]) | {"package": ["iniconfig", "words"]}
    row = row | {"extra_info": row["extra_info"] | {"repository": json.dumps(info)}}
    with pytest.raises(ValueError, match="Python has iniconfig installed"):
        Played((row, folder, repo), box_server)


def test_tests_that_cannot_begin_are_no_fault_of_the_agent(made, box_server, tmp_path):
    row, folder, repo = made
    info = json.loads(row["extra_info"]["repository"])
    for name, _ in info["archives"].values():
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    name, _ = info["archives"]["tests"]
    files = archive.unpack((folder / name).read_bytes())
    text = files["tests/run.py"].data.decode()
    files["tests/run.py"] = archive.File(text.replace('["as-agent"]', '["false"]').encode())
    (tmp_path / name).write_bytes(archive.pack(files))
    info["archives"]["tests"] = [name, hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()]
    row = row | {"extra_info": row["extra_info"] | {"repository": json.dumps(info)}}
    with pytest.raises(ToolUnavailable, match="could not begin: as-agent ended with 1"):
        Played((row, tmp_path, repo), box_server, write(SOURCE, repositories.NEW))


def test_archives_that_are_missing_or_others_are_refused(made, box_server, tmp_path):
    row, folder, repo = made
    with pytest.raises(ValueError, match="does not exist.*Set `folder`"):
        Played((row, tmp_path, repo), box_server)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ValueError, match="is not the file that the data were made with"):
        Played((row, tmp_path, repo), box_server)
    with pytest.raises(ValueError, match="which is none"):
        Played((row, tmp_path / "none", repo), box_server)
