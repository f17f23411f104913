"""When a teacher is given up: only after many failures in a row."""

import pytest

from verl_ext.rollout.servers import ServerFailure
from verl_ext.rollout.talk import Answer
from verl_ext.traces.teacher import GIVE_UP_AFTER, Teacher, TeacherDown


async def test_only_failures_in_a_row_count():
    failures = GIVE_UP_AFTER - 1
    fails = iter([*[True] * failures, False, *[True] * GIVE_UP_AFTER])

    async def answer(messages: list[dict[str, str]]) -> Answer:
        if next(fails):
            raise ServerFailure("it is away")
        return Answer("<think>\nLet me see.\n</think>\nyes")

    teacher = Teacher(answer)
    assert [await teacher.ask([]) for _ in range(failures)] == [None] * failures
    assert (await teacher.ask([])).text.strip() == "yes"
    assert [await teacher.ask([]) for _ in range(failures)] == [None] * failures
    with pytest.raises(TeacherDown, match=f"The last {GIVE_UP_AFTER} requests failed: it is away"):
        await teacher.ask([])
