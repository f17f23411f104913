"""`retool fleet`, and the files by which it reaches a run."""

import subprocess
import sys
import threading
import time

import pytest

from verl_ext.fleet.__main__ import main
from verl_ext.fleet.commands import FOLDER, NoAnswer, Refused, ask, clear, take


@pytest.fixture
def obey(tmp_path):
    """Begin to answer the commands of `tmp_path` with a function; return a list in which they are also noted."""
    ended, threads = threading.Event(), []

    def obey(reply):
        told = []

        def look():
            while not ended.wait(0.02):
                for command in take(tmp_path):
                    told.append(command.words)
                    reply(command)

        threads.append(threading.Thread(target=look))
        threads[0].start()
        return told

    yield obey
    ended.set()
    for thread in threads:
        thread.join()


def files(folder):
    return [path.name for path in (folder / FOLDER).iterdir()]


def test_a_command_is_answered_once_and_leaves_no_file(tmp_path, obey):
    told = obey(lambda command: command.answer({"words": command.words}))
    assert ask(tmp_path, ["remove", "2"]) == {"words": ["remove", "2"]}
    assert told == [["remove", "2"]] and files(tmp_path) == []


def test_what_the_run_cannot_do_is_reported(tmp_path, obey):
    obey(lambda command: command.refuse("it is the only one"))
    with pytest.raises(Refused, match="it is the only one"):
        ask(tmp_path, ["remove", "2"])
    assert files(tmp_path) == []


def test_a_command_that_nobody_takes_is_withdrawn_for_good(tmp_path):
    with pytest.raises(NoAnswer, match=r"No run read .*fleet_commands within 0 s\. Expected an RL run"):
        ask(tmp_path, ["add"], take_s=0.2)
    assert files(tmp_path) == [] and [*take(tmp_path)] == []


def test_a_run_that_takes_a_command_and_dies_is_distinguished(tmp_path, obey):
    obey(lambda command: None)
    with pytest.raises(NoAnswer, match=r"The run accepted \['add'\] but did not answer within 0 s"):
        ask(tmp_path, ["add"], answer_s=0.2)
    assert files(tmp_path) == []


def test_an_answer_for_which_nobody_waits_leaves_no_file(tmp_path, obey):
    late = []
    obey(late.append)
    with pytest.raises(NoAnswer, match="It may still do it"):
        ask(tmp_path, ["remove", "1"], answer_s=0.2)
    late[0].answer("done")
    assert files(tmp_path) == []


def test_a_file_that_is_not_a_command_is_answered_and_delays_no_other(tmp_path, obey):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "0.request.json").write_text("remove 1")
    obey(lambda command: command.answer(command.words))
    assert ask(tmp_path, ["list"]) == ["list"]
    assert "Expected a list of words in JSON" in (tmp_path / FOLDER / "0.answer.json").read_text()


def test_commands_are_taken_in_their_order_and_two_do_not_meet(tmp_path, obey):
    for name in ("0002_b", "0001_a"):
        (tmp_path / FOLDER).mkdir(exist_ok=True)
        (tmp_path / FOLDER / f"{name}.request.json").write_text(f'["{name}"]')
    told = obey(lambda command: command.answer(command.words))
    answers = {}
    threads = [
        threading.Thread(target=lambda word=word: answers.update({word: ask(tmp_path, [word])})) for word in "xyz"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {word: [word] for word in "xyz"} and told[:2] == [["0001_a"], ["0002_b"]]


def test_a_start_of_the_run_forgets_older_commands(tmp_path):
    clear(tmp_path)  # no folder yet
    (tmp_path / FOLDER).mkdir()
    for kind in ("request", "taken", "answer"):
        (tmp_path / FOLDER / f"1_a.{kind}.json").write_text("[]")
    clear(tmp_path)
    assert files(tmp_path) == []


def test_a_command_that_waits_for_the_run_to_start_is_taken(tmp_path):
    told = []
    thread = threading.Thread(target=lambda: told.append(ask(tmp_path, ["list"], take_s=10, answer_s=10)))
    thread.start()
    while not list((tmp_path / FOLDER).glob("*.request.json")):
        time.sleep(0.01)
    clear(tmp_path)
    [command] = take(tmp_path)
    command.answer("here")
    thread.join()
    assert told == ["here"]


ROWS = [
    {"server": 0, "address": "10.0.0.1:80", "state": "serves", "requests": 7, "ranks": [4, 3], "version": 41},
    {"server": 2, "address": None, "state": "starts", "requests": None, "ranks": [], "version": None},
]
PRINTED = """\
server  address      state   requests   weights of step
0       10.0.0.1:80  serves  7 = 4 + 3  41
2       -            starts  -          -
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "global_step_1" / "actor").mkdir(parents=True)
    (tmp_path / "metrics-1.jsonl").write_text("")
    (tmp_path / "prompts.jsonl").write_text("")
    return tmp_path


def test_list_prints_a_table(run, obey, capsys):
    obey(lambda command: command.answer(ROWS))
    main(["list", str(run)])
    assert capsys.readouterr().out == PRINTED


@pytest.mark.parametrize("words", [["add"], ["remove", "2"]])
def test_the_words_of_the_command_reach_the_run(run, obey, capsys, words):
    told = obey(lambda command: command.answer("Server 2 does."))
    main([words[0], str(run), *words[1:]])
    assert told == [words] and capsys.readouterr().out == "Server 2 does.\n"


def test_a_refusal_is_the_exit_status(run, obey, capsys):
    obey(lambda command: command.refuse("No server 7 serves."))
    with pytest.raises(SystemExit, match="No server 7 serves."):
        main(["remove", str(run), "7"])


def test_a_folder_that_is_no_run_gets_no_files(tmp_path):
    with pytest.raises(SystemExit, match="No run at"):
        main(["list", str(tmp_path)])
    assert [*tmp_path.iterdir()] == []


def test_the_command_loads_neither_verl_nor_ray():
    heavy = "{'torch', 'ray', 'vllm', 'verl', 'omegaconf'}"
    program = f"import sys, verl_ext.fleet.__main__; print(sorted({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout == b"[]\n"
