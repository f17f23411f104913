"""Episodes of `terminal` in the real agent loop and real boxes, played by a scripted model."""

import asyncio
import base64
import json
import threading
from contextlib import suppress
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

from tests.unit.sandbox.server_process import Server, wait_until
from verl_ext.environments.terminal import Terminal, reward_of
from verl_ext.episode import MAX_EVIDENCE
from verl_ext.records.trajectories import to_record
from verl_ext.rollout import lives
from verl_ext.sandbox.client import SandboxClient
from verl_ext.settings.objects import load_object
from verl_ext.tasks import archive, task
from verl_ext.tasks.archive import File
from verl_ext.tasks.task import BoxTask

TEST = """
[ "$(cat /app/count.txt)" = 3 ] || { echo "count.txt is wrong"; exit 1; }
"""
TASK = BoxTask(
    "count-lines",
    "Write the number of lines of /app/log.txt to /app/count.txt.",
    image=archive.pack({"app/log.txt": "a\nb\nc\n", "app/old.txt": "old"}),
    tests=archive.pack({"tests/test.sh": TEST}),
    solution=archive.pack({"solution/solve.sh": "wc -l < log.txt > count.txt"}),
    agent_s=20,
    command_s=2,
    verifier_s=10,
    memory_mb=256,
    disk_mb=8,
)
SOLVE = ("bash", {"command": "wc -l < log.txt > count.txt"})
SUBMIT = ("submit", {})
DONE = "I am done."


class Played(Terminal):
    """One with a client of its own, because a client belongs to the event loop of an episode."""

    def __init__(self, config: Any):
        super().__init__(config)
        settings = config.retool.sandbox
        self.sandbox = SandboxClient(settings.urls, queue_timeout_s=settings.queue_timeout_s)

    async def close(self) -> None:
        await super().close()
        await self.sandbox.aclose()


class Cut(Played):
    """One whose server fails after the box was sealed: `then` is called at that moment."""

    then: Any = None

    def cross(self, files: Any) -> Any:
        type(self).then()
        return super().cross(files)


@pytest.fixture
def play(roll_out, qwen_tokenizer, box_server):
    """Let a model write the turns, each a text or calls; returns the episode and what the model was shown at last."""

    def run(*turns: Any, of: BoxTask = TASK, url: str = "", **settings: Any) -> tuple[Any, str]:
        texts = [turn if isinstance(turn, str) else called(*turn) for turn in turns]
        ids = [qwen_tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in texts]
        settings = {
            "max_tool_calls": 9,
            "max_parallel_calls": 4,
            "response_length": 4000,
            "environment": f"{__file__}:Played",
        } | settings
        row = task.row(of)
        episode, model, _ = roll_out(
            *(qwen_tokenizer, ids),
            **{"protocol": "hermes", "max_tool_response_tokens": 400, "prompt": row, "question": of.instruction},
            **{"sandbox": {"urls": [url or box_server.url], "queue_timeout_s": 20}} | settings,
        )
        shown = model.calls[-1]["prompt_ids"] if model.calls else []
        return episode, qwen_tokenizer.decode(shown)

    return run


def called(*calls: tuple[str, dict]) -> str:
    bodies = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def bash(command: str) -> list[tuple[str, dict]]:
    return [("bash", {"command": command})]


def again(server: Server, evidence: bytes, of: BoxTask = TASK) -> Any:
    """Score an episode again, in an object of its own."""

    async def score() -> Any:
        environment = Played(OmegaConf.create({"retool": {"sandbox": {"urls": [server.url], "queue_timeout_s": 20}}}))
        try:
            return await environment.score_again(task.row(of), evidence)
        finally:
            await environment.close()

    return asyncio.run(score())


def boxes(server: Server) -> int:
    _, _, content = server.request("/metrics")
    return int(
        float(next(line.split()[1] for line in content.decode().splitlines() if line.startswith("sandbox_boxes ")))
    )


# What a model does ----------------------------------------------------------------------------------------------------


def test_a_task_is_solved_and_scored_and_can_be_scored_again(play, box_server):
    episode, shown = play(bash("cat log.txt; wc -l log.txt"), [SOLVE], [SUBMIT])
    assert (episode.finish_reason, episode.score.acc, episode.score.method) == ("answer", 1.0, "tests: exit code 0")
    assert all(f'"name": "{name}"' in shown for name in ("bash", "edit", "submit")) and TASK.instruction in shown
    assert "a\nb\nc\n3 log.txt" in shown, "what the command printed"
    assert episode.use.ok == 3 and episode.row.mask[-1] == 1, "nothing follows `submit`"
    assert 0 < len(episode.score.evidence) <= MAX_EVIDENCE
    assert "app/count.txt" in archive.unpack(episode.score.evidence)
    assert again(box_server, episode.score.evidence).acc == 1.0
    assert again(box_server, archive.pack({"app/count.txt": "2\n"})).acc == 0.0
    assert boxes(box_server) == 0
    assert base64.b64decode(to_record(episode)["evidence"]) == episode.score.evidence


def test_what_a_turn_calls_after_submit_is_not_run(play):
    episode, _ = play([SOLVE, SUBMIT, *bash("rm count.txt")])
    assert (episode.finish_reason, episode.score.acc) == ("answer", 1.0)
    assert [call.result.output for call in episode.turns[0].calls][1:] == ["submitted", "not run"]


def test_a_turn_without_a_call_ends_it_and_nothing_done_is_nothing_right(play):
    episode, _ = play(DONE)
    assert (episode.finish_reason, episode.score.acc, episode.score.method) == ("answer", 0.0, "tests: exit code 1")


def test_a_response_without_room_is_scored_by_its_box(play):
    episode, _ = play([SOLVE], bash("ls"), bash("ls"), max_tool_calls=2)
    assert (episode.finish_reason, episode.score.acc) == ("max_turns", 1.0)


def test_files_are_edited(play):
    episode, shown = play(
        [("edit", {"path": "new/a.txt", "old": "", "new": "one\ntwo it's \"\n"})],
        [("edit", {"path": "/app/new/a.txt", "old": "two", "new": "2"})],
        bash("cat new/a.txt"),
        [("edit", {"path": "log.txt", "old": "\n", "new": ""})],
        [("edit", {"path": "none.txt", "old": "x", "new": ""})],
        [("edit", {"path": "/usr/bin/ls", "old": "", "new": "x"})],
        DONE,
    )
    assert "one\n2 it's \"" in shown
    assert "ToolError: `old` occurs 3 times in log.txt; it must occur exactly once" in shown
    assert "ToolError: none.txt: No such file or directory" in shown
    assert "ToolError: /usr/bin/ls: " in shown
    assert dict(episode.use.errors) == {"ToolError": 3}


def test_the_folder_stays_from_call_to_call_and_an_exit_code_is_told(play):
    episode, shown = play(bash("mkdir deep && cd deep"), bash("pwd; exit 7"), bash("sleep 60"), DONE)
    assert "/app/deep" in shown and "Exited with code 7" in shown and "TimeoutError: stopped after 2 s" in shown
    assert dict(episode.use.errors) == {"exit_code": 1, "timeout": 1}


def test_when_its_time_is_over_the_episode_ends_and_is_scored(play):
    episode, _ = play([SOLVE], bash("sleep 60"), bash("echo late"), of=altered(agent_s=1.5))
    assert (episode.finish_reason, episode.score.acc) == ("timeout", 1.0)
    assert [call.result.error for turn in episode.turns for call in turn.calls] == [None, "timeout"]


def test_a_deleted_file_of_the_image_is_not_in_the_scoring_box(play):
    tests = archive.pack({"tests/test.sh": "test ! -e /app/old.txt && test -e /app/log.txt"})
    assert play(bash("rm old.txt"), DONE, of=altered(tests=tests))[0].score.acc == 1.0
    assert play(DONE, of=altered(tests=tests))[0].score.acc == 0.0


def altered(**changes: Any) -> BoxTask:
    return BoxTask(**{**{name: getattr(TASK, name) for name in TASK.__dataclass_fields__}, **changes})


# What a model plants --------------------------------------------------------------------------------------------------

FAKES = "for p in cat test bash; do printf '#!/bin/sh\\nexit 0\\n' > ~/bin/$p; chmod +x ~/bin/$p; done"
WRITER = "while :; do mkdir -p /tests; echo 'exit 0' > /tests/test.sh; sleep 0.01; done"
PLANTED = {
    "a test": "mkdir -p /tests; echo 'exit 0' > /tests/test.sh",
    "a reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "a start-up file": "echo 'exit 0' > ~/.bashrc; echo 'exit 0' > /app/.profile; echo 'exit 0' > ~/.bash_env",
    "programs": f"mkdir -p ~/bin; {FAKES}",
    "a writer": f"({WRITER}) >/dev/null 2>&1 & sleep 1",
    "a link": "rm -f count.txt; ln -s /tests/answer count.txt",
    "a deep folder": "python3 -c \"import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\"",
    "a pipe": "mkfifo count.txt",
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_scores_nothing(play, what):
    episode, _ = play(bash(PLANTED[what]), [SUBMIT])
    assert (episode.finish_reason, episode.score.acc) == ("answer", 0.0)
    if what in ("a test", "a reward", "a writer"):
        assert "tampering: planted /" in episode.score.method


def test_what_is_planted_is_named_although_the_task_is_solved(play):
    episode, _ = play(bash(PLANTED["a test"]), [SOLVE], [SUBMIT])
    assert episode.score.acc == 1.0 and "; tampering: planted /tests/test.sh" in episode.score.method


def test_a_model_may_make_a_folder_of_a_file_of_the_image(play):
    inside = "[ -e /app/log.txt/count.txt ]"
    of = altered(tests=archive.pack({"tests/test.sh": inside}), artifacts=("/app/log.txt/count.txt",))
    episode, _ = play(bash("rm log.txt; mkdir log.txt; echo 3 > log.txt/count.txt"), DONE, of=of)
    assert (episode.score.acc, episode.score.method) == (1.0, "tests: exit code 0")


def test_a_reward_file_counts_if_the_tests_wrote_it(play):
    share = "[ -e /app/count.txt ] && echo 0.25 > /logs/verifier/reward.txt; exit 1"
    of = altered(tests=archive.pack({"tests/test.sh": share}), result="reward_file")
    episode, _ = play([SOLVE], DONE, of=of)
    assert (episode.score.acc, episode.score.verdict, episode.score.method) == (0.25, "partial", "tests: reward file")
    episode, _ = play(bash("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"), DONE, of=of)
    assert episode.score.acc == 0.0 and "tests: no reward; tampering: planted /logs/verifier" in episode.score.method


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"reward.txt": b"1\n"}, 1.0),
        ({"reward.txt": b" 0.5 "}, 0.5),
        ({"reward.json": b'{"reward": 0.75, "other": 1}'}, 0.75),
        ({"reward.txt": b"0", "reward.json": b'{"reward": 1}'}, 0.0),
        ({}, None),
        ({"reward.txt": b""}, None),
        ({"reward.txt": b"nan"}, None),
        ({"reward.txt": b"inf"}, None),
        ({"reward.txt": b"1.5"}, None),
        ({"reward.txt": b"-1"}, None),
        ({"reward.json": b"1"}, None),
        ({"reward.json": b'{"score": 1}'}, None),
        ({"reward.json": b'{"reward": null}'}, None),
        ({"reward.json": b"[" * 10000}, None),
        ({"reward.json": b"\xff"}, None),
    ],
)
def test_a_reward_is_a_number_between_0_and_1(files, expected):
    assert reward_of({f"logs/verifier/{name}": File(data) for name, data in files.items()}) == expected


# What breaks ----------------------------------------------------------------------------------------------------------


def test_tests_that_the_artifacts_break_are_the_models_doing(play):
    tests = archive.pack({"tests/test.sh": "bash /app/run.sh"})
    episode, _ = play(bash("echo 'sleep 60' > run.sh"), DONE, of=altered(tests=tests, verifier_s=1))
    assert (episode.score.acc, episode.score.method) == (0.0, "tests: no end within 1 s")
    episode, _ = play(bash("echo 'kill -9 -1' > run.sh"), DONE, of=altered(tests=tests))
    assert episode.score.acc == 0.0 and episode.score.verdict == "wrong"


def test_more_files_than_can_go_over_are_the_models_doing(play):
    many = "mkdir m && cd m && echo x > 0 && for i in $(seq 1 9000); do echo $i; done | xargs -n 500 touch"
    episode, _ = play(bash(many), bash("cd /app && wc -l < log.txt > count.txt"), DONE)
    assert episode.score.acc == 0.0 and "its artifacts are more than 8,192 files" in episode.score.method


def test_artifacts_that_no_box_takes_are_the_models_doing_but_a_broken_task_is_ours(play, box_server):
    deep = archive.pack({"/".join(["app", *"d" * 70, "x"]): b""})
    score = again(box_server, deep)
    assert score.acc == 0.0 and "its artifacts are refused: " in score.method
    with pytest.raises(ValueError, match="names in a path"):
        play(DONE, of=altered(tests=archive.pack({"/".join(["tests", *"d" * 70]): b""})))


ODD = r"""
import os
os.mkdir("odd"); os.chdir("odd")
for name in (b"\xff\xfe", b"a\nb", b" ", b"back\\slash", b"x" * 255, "é".encode(), b"-rf", b"...", b"\x1b[31m"):
    open(name, "w").close()
os.symlink("a\nb", "link"); os.symlink("/tests/test.sh", "out"); os.symlink("loop", "loop"); os.link("-rf", "hard")
os.mkfifo("pipe"); os.mkdir("closed", 0); open("unreadable", "w").close(); os.chmod("unreadable", 0)
for name in ("sparse1", "sparse2", "sparse3"):
    os.truncate(os.open(name, os.O_CREAT | os.O_RDWR), 7 << 20)
"""


def test_odd_files_neither_break_the_scoring_nor_reach_out_of_it(play, box_server):
    episode, shown = play(bash(f"python3 - <<'END'\n{ODD}END"), [SOLVE], [SUBMIT])
    assert "Traceback" not in shown, shown
    assert episode.score.acc == 1.0, episode.score.method
    assert "; left behind: /app/odd/" in episode.score.method and episode.score.method.isprintable()
    crossed = archive.unpack(episode.score.evidence)
    assert not {"app/odd/out", "app/odd/pipe", "app/odd/sparse3"} & crossed.keys()
    assert {"app/odd/\udcff\udcfe", "app/odd/a\nb", "app/odd/hard", "app/odd/closed"} <= crossed.keys()
    assert again(box_server, episode.score.evidence).acc == 1.0


def test_a_full_disk_is_the_models_doing(play):
    episode, _ = play(bash("yes | head -c 100M > big; true"), [SOLVE], DONE)
    assert episode.score.verdict == "wrong"


@pytest.fixture
def cut(play, monkeypatch):
    """Play with `Cut`; the first argument is what is done after the box was sealed."""
    monkeypatch.setattr(lives, "RETRY_PAUSE_S", 0.01)
    where = f"{__file__}:Cut"

    def run(then: Any, *turns: Any, **settings: Any) -> Any:
        monkeypatch.setattr(load_object(where), "then", then)
        return play(*turns, environment=where, **settings)[0]

    return run


def test_a_server_that_is_killed_while_it_scores_is_not_the_models_fault(cut):
    dying = Server("--preload", "")
    sandbox = {"urls": [dying.url], "queue_timeout_s": 1}
    try:
        episode = cut(lambda: (dying.process.kill(), dying.process.wait()), [SOLVE], DONE, sandbox=sandbox)
    finally:
        dying.stop()
    assert (episode.score.verdict, episode.score.acc) == ("unknown", None)
    assert episode.score.method.startswith("environment: ")


def runs_tests(server: Server) -> bool:
    with suppress(psutil.NoSuchProcess):  # one that has just ended
        return any(each.name() == "sleep" for each in server.descendants())
    return False


@pytest.mark.nightly
def test_another_server_scores_what_a_dead_one_was_scoring(cut):
    """The server in which the tests run dies; the artifacts, which were sealed before, are scored by the other one."""
    servers, killed = [Server("--preload", "") for _ in range(2)], []

    def kill_the_one_that_scores() -> None:
        wait_until(lambda: any(map(runs_tests, servers)), timeout_s=20)
        (scores,) = [each for each in servers if runs_tests(each)]
        killed.append(scores)
        scores.process.kill()

    slow = altered(tests=archive.pack({"tests/test.sh": f"sleep 3\n{TEST}"}))
    sandbox = {"urls": [each.url for each in servers], "queue_timeout_s": 20}
    try:
        then = threading.Thread(target=kill_the_one_that_scores).start
        episode = cut(then, [SOLVE], DONE, of=slow, sandbox=sandbox)
    finally:
        for each in servers:
            each.stop()
    assert len(killed) == 1
    assert (episode.score.acc, episode.score.method) == (1.0, "tests: exit code 0")
