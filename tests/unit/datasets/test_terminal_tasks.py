"""The generated terminal tasks (data/terminal): solutions, tests and splits. Solutions run in a temporary folder here;
`retool environments validate` runs them in boxes."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from terminal import check, template, words

from verl_ext.tasks import archive, harbor
from verl_ext.tasks.task import of_row

TEMPLATES = template.load()
STEPS = {"easy": {1}, "medium": {2, 3}, "hard": {4, 5, 6}}
PERSON = {f"GIT_{who}_{what}": "agent@box" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@pytest.fixture
def lay(tmp_path, monkeypatch):
    """Put a task's image under a folder, which the checks then read; programs of the agent run as they are."""
    agent = tmp_path / "bin" / "as-agent"
    agent.parent.mkdir()
    agent.write_text('#!/bin/bash\nexec "$@"\n')
    agent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{agent.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}")

    def make(task, name):
        top = tmp_path / name
        for path, entry in archive.unpack(task.image).items():
            (top / path).parent.mkdir(parents=True, exist_ok=True)
            (top / path).write_bytes(entry.data)
            (top / path).chmod(entry.mode)
        (top / "app").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(check, "APP", top / "app")
        return top

    return make


def solve(task, top):
    (top / "tmp").mkdir()
    steps = archive.unpack(task.solution)["solution/solve.sh"].data.decode()
    steps = re.sub(r"(?<![\w.*])/(app|tmp)\b", rf"{top}/\1", steps)
    alone = os.environ | PERSON | {"GIT_CONFIG_GLOBAL": os.devnull, "LANG": "C.UTF-8"}
    return subprocess.run(["bash", "-c", steps], env=alone, capture_output=True, text=True, cwd=top)


def expected(made):
    """What is expected of each path, without the paths."""
    return [[one[0], *(json.dumps(each).replace(one[1], "") for each in one[2:])] for one in made.checks]


@pytest.mark.parametrize("one", TEMPLATES, ids=lambda one: f"{one.kind}/{one.name}")
def test_only_the_solution_of_the_same_instance_passes(one, lay):
    first, *others = islice(template.instances(one, "tests"), 30)
    other = next((each for each in others if expected(each.made) != expected(first.made)), others[0])
    task, checks = first.task(), first.made.checks

    lay(task, "untouched")
    assert check.first_wrong(checks), "the untouched state passes"

    solved = lay(task, "solved")
    said = solve(task, solved)
    assert check.first_wrong(checks) == "", said

    of_other = lay(other.task(), "other")
    solve(other.task(), of_other)
    assert check.first_wrong(other.made.checks) == ""
    mixed = lay(task, "mixed")
    pairs = zip([c[1] for c in checks], [c[1] for c in other.made.checks], strict=False)
    if expected(other.made) == expected(first.made):  # only their paths differ
        pairs = [(c[1], c[1]) for c in [*other.made.checks, *checks]]
    for path, source in dict(pairs).items():
        target, source = mixed / "app" / path, of_other / "app" / source
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.exists():
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    assert check.first_wrong(checks), f"the result of {other.instruction!r} passes for {first.instruction!r}"

    check.APP = solved / "app"
    files = [path for path in {solved / "app" / c[1] for c in checks if c[0] not in ("gone", "mode")} if path.is_file()]
    for path in files:
        path.write_bytes(b"")
    assert not files or check.first_wrong(checks), "empty files pass"


def named(made, ending):
    return next(path for path in made.files if path.endswith(ending))


@pytest.mark.parametrize(
    ("name", "further", "passes"),
    [
        ("one_member", lambda made: f"tar -xzf {named(made, '.tar.gz')}", False),
        ("join_parts", lambda made: "rm *.tar.gz", False),
        ("pack_folder", lambda made: f"gunzip -c {made.checks[0][1]} > x; mv x {made.checks[0][1]}", False),
        ("scripts_and_rest", lambda made: f"chmod 777 {made.steps[0].split()[1]}/*/", False),
        ("remove_job", lambda made: f"echo '# 1 1 * * * ./{made.checks[1][2]}.sh' >> {made.checks[0][1]}", False),
        ("main_module", lambda made: f"echo 'print({made.checks[0][4]})' > {made.checks[0][1]}/__main__.py", False),
        (
            "rename_module",
            lambda made: "sed -i -E 's/^from \\w+ import (\\w+)$/from . import \\1/' */[!_]*.py",
            True,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_nearly_solves_a_task_does_not_and_another_right_way_does(lay, name, further, passes):
    one = next(islice(template.instances(next(one for one in TEMPLATES if one.name == name), "near"), 1))
    top = lay(one.task(), "near")
    solve(one.task(), top)
    assert check.first_wrong(one.made.checks) == ""
    subprocess.run(["bash", "-c", further(one.made)], cwd=top / "app", check=True)
    assert (check.first_wrong(one.made.checks) == "") == passes


@pytest.mark.nightly
def test_there_are_sixty_templates_of_twelve_kinds_and_their_difficulty_is_the_number_of_steps():
    assert len(TEMPLATES) >= 60
    assert {one.kind for one in TEMPLATES} == set(template.KINDS) and len(template.KINDS) == 12
    for kind in template.KINDS:
        own = [one.difficulty for one in TEMPLATES if one.kind == kind]
        assert len(own) >= 5 and set(own) == set(STEPS), kind
    for one in TEMPLATES:
        for instance in islice(template.instances(one, 1), 80):  # all different
            assert len(instance.made.steps) in STEPS[one.difficulty], one.name
            assert re.match(r"[A-Z`0-9a-z./]", instance.instruction) and "  " not in instance.instruction
            if one.difficulty == "easy":
                assert len(instance.instruction.split()) < 40, instance.instruction
                assert len(instance.made.steps[0]) < 80, instance.made.steps


def test_no_name_of_a_package_or_program_hides_a_module_of_python():
    assert not {*words.WORDS, *words.LIBRARIES} & sys.stdlib_module_names


def test_the_same_seed_gives_the_same_tasks_and_another_one_others():
    for one in TEMPLATES:
        first, again, others = ([each.task() for each in islice(template.instances(one, s), 3)] for s in (1, 1, 2))
        assert first == again
        assert not {task.name for task in first} & {task.name for task in others}


def prepare(out, *arguments):
    script = Path(template.__file__).parents[1] / "prepare_terminal.py"
    told = subprocess.run([sys.executable, script, f"--out={out}", *arguments], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return {path.stem: pq.read_table(path).to_pylist() for path in out.glob("*.parquet")}


@pytest.mark.nightly
def test_training_and_tests_have_different_tasks_and_held_out_kinds_are_in_tests_only(tmp_path):
    first = prepare(tmp_path / "first", "--rl=150", "--test=100", "--held-out", "git", "logs")
    other = prepare(tmp_path / "other", "--rl=150", "--test=100", "--held-out", "git", "logs", "--seed=1")
    assert first["eval"] == other["eval"], "tests depend on the seed"
    told = {(name, row["prompt"][0]["content"]) for name, rows in first.items() for row in rows}
    assert len(told) == 150 + 2 * 100
    train = {row["prompt"][0]["content"] for each in (first, other) for row in each["rl_train"]}
    tests = {row["prompt"][0]["content"] for row in first["eval"]}
    assert len(train) > 290 and not train & tests
    kinds = {source: {r["extra_info"]["kind"] for r in first["eval"] if r["data_source"] == source} for source in
             ("terminal", "terminal_held_out")}  # fmt: skip
    assert kinds["terminal_held_out"] == {"git", "logs"}
    assert (
        kinds["terminal"]
        == {row["extra_info"]["kind"] for row in first["rl_train"]}
        == set(template.KINDS) - {"git", "logs"}
    )
    task = of_row(first["rl_train"][0])
    assert task.instruction == first["rl_train"][0]["prompt"][0]["content"]
    assert json.loads(first["rl_train"][0]["extra_info"]["gold_calls"])[0]["name"] == "bash"


def test_easy_tasks_take_one_command_and_few_tools_and_all_are_written_for_harbor(tmp_path):
    made = prepare(tmp_path, "--easy", "--rl=60", "--test=20", "--harbor", str(tmp_path / "harbor"))
    rows = made["rl_train"]
    for row in [*rows, *made["eval"]]:
        assert harbor.read(tmp_path / "harbor" / row["extra_info"]["id"]) == of_row(row)
    assert {row["extra_info"]["difficulty"] for row in rows} == {"easy"}
    assert all(len(json.loads(row["extra_info"]["gold_calls"])) == 1 for row in rows)
    assert all(row["extra_info"]["tool_selection"] == ["bash", "submit"] for row in rows)


def test_a_program_of_a_repositorys_configuration_does_not_run_in_its_test(lay):
    one = next(each for each in TEMPLATES if each.name == "commit_all")
    instance = next(template.instances(one, "tests"))
    top = lay(instance.task(), "top")
    solve(instance.task(), top)
    (folder,) = {path.parent for path in (top / "app").glob("*/.git")}
    settings = {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "far",
        "remote.far.promisor": "true",
        "remote.far.url": f"ext::touch {top}/ran",
        "protocol.ext.allow": "always",
    }
    for name, value in settings.items():
        subprocess.run(["git", "-C", folder, "config", name, value], check=True)
    path = next(Path(c[1], c[2][1].partition(":")[2]).name for c in instance.made.checks if c[2][0] == "show")
    show = ["git", "-C", folder, "rev-parse", f"HEAD:{path}"]
    blob = subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip()
    (folder / ".git/objects" / blob[:2] / blob[2:]).unlink()  # git would ask the far side for it
    assert check.first_wrong(instance.made.checks)
    assert not (top / "ran").exists()
    subprocess.run(["git", "-C", folder, "show", f"HEAD:{path}"], capture_output=True)
    assert (top / "ran").exists(), "this test is no attack any more"


@pytest.mark.parametrize(
    ("job", "same", "other"),
    [
        ("30 7 * * 1-5 ./a.sh", "30 07 * * mon-fri ./a.sh", "30 7 * * 1-6 ./a.sh"),
        ("0 0 * * * ./a.sh", "@daily ./a.sh", "@hourly ./a.sh"),
        ("*/20 * * * * ./a.sh", "0,20,40 * * * * ./a.sh", "*/15 * * * * ./a.sh"),
        ("0 9 * * 0 ./a.sh", "0  9 * *\t7 ./a.sh", "0 9 * * 1 ./a.sh"),
        ("0 9 1 2 * ./a.sh", "0 9 1 feb * ./a.sh", "0 9 1 feb * ./b.sh"),
    ],
)
def test_a_crontab_is_compared_by_its_meaning(tmp_path, monkeypatch, job, same, other):
    monkeypatch.setattr(check, "APP", tmp_path)
    for spelled, is_right in ((same, True), (other, False), ("7 7 ./a.sh", False), ("99 7 * * * ./a.sh", False)):
        (tmp_path / "jobs").write_text(f"# jobs\nSHELL=/bin/bash\n{spelled}\n")
        assert (check.first_wrong([["cron", "jobs", [job]]]) == "") == is_right, spelled


def test_artifacts_of_odd_types_and_sizes_are_wrong_and_raise_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "APP", tmp_path)
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with open(tmp_path / "large", "wb") as large:
        large.truncate(2**40)
    for path in ("link", "pipe", "deep.json", "large", "absent"):
        for name, *rest in (
            ("same", "x"),
            ("is_json", 1),
            ("members", {"a": "x"}),
            ("gz", "x"),
            ("sql", "select * from t", []),
        ):
            assert check.first_wrong([[name, path, *rest]]), (name, path)
    assert check.first_wrong([["tree", ".", {}]])
    assert check.first_wrong([]) == "no checks"


def test_traces_are_what_the_boxes_said_and_only_of_solutions_that_score_1():
    import asyncio

    import prepare_terminal
    from terminal.traces import run_all

    from tests.unit.sandbox.boxes import need_boxes
    from verl_ext.protocols.hermes import HermesProtocol
    from verl_ext.protocols.trace import split_trace
    from verl_ext.sandbox.launch import running_server

    names = ("unpack", "commit_all", "first_or_last", "set_mode", "insert_row", "shell_times", "zip_application")
    found = [next(template.instances(one, 3)) for one in TEMPLATES if one.name in names]
    rows = prepare_terminal.rl_rows(found, "terminal", "train", True)
    wrong = prepare_terminal.rl_rows(found[:1], "terminal", "train", True)[0]
    wrong["extra_info"]["gold_calls"] = json.dumps([{"name": "bash", "arguments": {"command": "echo here; pwd"}}])
    with running_server(options=("--preload", "")) as url:
        need_boxes(url)
        traces, failed = asyncio.run(run_all([*rows, wrong], url))
    assert [each["id"] for each in traces] == [row["extra_info"]["id"] for row in rows]
    assert len(failed) == 1 and "scores 0.0" in failed[0][1]
    for one, each in zip(found, traces, strict=True):
        prompt, tools, _ = split_trace(each["messages"], each["tools"], HermesProtocol(None), "")
        assert prompt[-1]["content"] == one.instruction
        assert [tool["function"]["name"] for tool in tools] == ["bash", "submit"]
        said = [message["content"] for message in json.loads(each["messages"]) if message["role"] == "tool"]
        assert len(said) == len(one.made.steps)
        if one.template.name == "zip_application":
            assert said[-1] == one.made.checks[0][-1], "the program prints in the trace what it prints in the test"
