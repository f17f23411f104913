"""A task and its row: what goes into a data set comes out again, and a wrong task says what is wrong."""

import json

import pytest

from verl_ext.tasks import archive, task
from verl_ext.tasks.task import BoxTask

TASK = BoxTask(
    "count-lines-1",
    "Write the number of lines of /app/log.txt to /app/count.txt.",
    image=archive.pack({"app/log.txt": "a\nb\n"}),
    tests=archive.pack({"tests/test.sh": 'test "$(cat /app/count.txt)" = 2\n'}),
    solution=archive.pack({"solution/solve.sh": "wc -l < /app/log.txt > /app/count.txt\n"}),
    artifacts=("/app/count.txt",),
    kind="text",
    difficulty="easy",
)


def test_a_task_comes_out_of_its_row_as_it_went_in() -> None:
    row = task.row(TASK, index=7, gold_calls=[{"name": "bash", "arguments": {"command": "true"}}])
    assert task.of_row(row) == TASK
    assert task.of_row(json.loads(json.dumps(row))) == TASK
    assert row["prompt"] == [{"role": "user", "content": TASK.instruction}]
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("terminal", "count-lines-1")
    assert (row["extra_info"]["index"], json.loads(row["extra_info"]["gold_calls"])[0]["name"]) == (7, "bash")


def test_the_prompt_of_a_row_has_neither_tests_nor_solution() -> None:
    assert "tests" not in json.dumps(task.row(TASK)["prompt"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"artifacts": ["/tests/test.sh"]}, "at or below /app"),
        ({"artifacts": ["/app/../tests"]}, "at or below /app"),
        ({"artifacts": ["app"]}, "at or below /app"),
        ({"artifacts": []}, "no artifacts"),
        ({"workdir": "/"}, "at or below /app"),
        ({"result": "stdout"}, "exit_code or reward_file"),
        ({"verifier_s": 0}, "above 0"),
        ({"verifier_s": 301}, "at most 300 are allowed"),
        ({"name": " "}, "expected a text"),
        ({"image": "no base64"}, "extra_info.task is no task"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_a_wrong_task_says_what_is_wrong(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoxTask.from_info(TASK.to_info() | changes)


@pytest.mark.parametrize("text", ["[]", "7", "null", "no JSON"])
def test_text_that_holds_no_task_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="extra_info.task is no task"):
        BoxTask.from_info(text)


@pytest.mark.parametrize(
    ("key", "files"),
    [("image", {"tests/test.sh": b""}), ("tests", {"app/x": b""}), ("solution", {"tests/x": b""})],
)
def test_an_archive_with_files_of_another_place_is_refused(key: str, files: dict) -> None:
    with pytest.raises(ValueError, match=f"{key} has"):
        BoxTask.from_info(BoxTask("x", "do it", **{key: archive.pack(files)}).to_info())


def test_a_row_without_a_task_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no extra_info\.task"):
        task.of_row({"extra_info": {"index": 1}})
