"""The environment `search`: an index of a local corpus, in the real agent loop."""

import asyncio
import fcntl
import itertools
import json
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from verl_ext.environments import corpus as corpora
from verl_ext.environments.by_name import Environments
from verl_ext.environments.search import Search
from verl_ext.environments.tool_errors import ToolError, ToolUnavailable
from verl_ext.protocols.base import Call
from verl_ext.runs import parquet

DOCUMENTS = [
    {"id": "orla", "title": "Orla Venn", "text": "Orla Venn is a clockmaker and lives in Karst."},
    {"id": "karst", "title": "Karst", "text": "Karst is a town. " + "It has a market. " * 200 + "It has 17 bridges."},
    {"id": "zoo", "text": "Of tapirs, tapirs and naïve tapirs."},
]


@pytest.fixture
def corpus(tmp_path, cache) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return file


@pytest.fixture
def search(corpus) -> Search:
    return Search(corpus=str(corpus))


def test_a_question_is_answered_from_two_documents_in_the_agent_loop(corpus, roll_out, qwen_tokenizer):
    def turn(text: str, **call) -> list[int]:
        text += f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if call else ""
        return qwen_tokenizer.encode(text) + [qwen_tokenizer.eos_token_id]

    turns = [
        turn("", name="search", arguments={"query": "Where does Orla Venn live?"}),
        turn("", name="read", arguments={"id": "karst", "page": 3}),
        turn("", name="read", arguments={"id": "atlantis"}),
        turn("\\boxed{17}"),
    ]
    entry = {"name": "search", "corpus": str(corpus)}
    settings = {"protocol": "hermes", "response_length": 3000, "max_tool_response_tokens": 900, "environment": entry}
    episode, *_ = roll_out(qwen_tokenizer, turns, **settings)
    told = [each.reply.text for each in episode.turns if each.reply]
    assert "1. [orla] Orla Venn\nOrla Venn is a clockmaker and lives in Karst." in told[0]
    assert "Karst (page 3 of 3)\n" in told[1] and "It has 17 bridges." in told[1]
    assert "ToolError: there is no document 'atlantis'; `search` shows the ids" in told[2]
    assert episode.finish_reason == "answer" and episode.use.ok == 2 and episode.use.errors == {"ToolError": 1}


def test_better_documents_come_first_and_a_stem_or_an_accent_does_not_matter(search):
    assert search.search("NAIVE").startswith("1. [zoo]") and search.search("tapir").startswith("1. [zoo]")
    lines = search.search("Karst Orla Venn").splitlines()
    assert [line.split()[1] for line in lines if line[:2] in ("1.", "2.")] == ["[orla]", "[karst]"]
    assert search.search("unheard of"), "`of` is a word of the corpus"
    assert search.search("xyzzy") == "No document has any of these words."


def test_a_document_is_read_by_pages_and_nothing_is_lost(search):
    first = search.read("karst")
    number = int(first.split(" of ")[1].split(")")[0])
    pages = [search.read("karst", page).partition("\n")[2] for page in range(1, number + 1)]
    assert "".join(pages) == DOCUMENTS[1]["text"] and number == 3
    for page in (0, -1, 4, 10**30):
        with pytest.raises(ToolError, match=f"karst has the pages 1 to 3, not {page}"):
            search.read("karst", page)
    with pytest.raises(ToolError, match="zoo has one page"):
        search.read("zoo", 2)


HOSTILE = [
    '"', "'", "*", "(", ")", "^", "-", ":", "+", "{", "}", "--", "/*", ";", "\0", "\ud800", "é", "—", "“", "½", "你好",
    "AND", "OR", "NOT", "NEAR(", "title:", "rank", "x'00'", '"a" OR "b', "NEAR(a b, 5)", "'; DROP TABLE documents; --",
    "\u202e", "\U0001f600", "a" * 10_000, "a_b", "%", "?", "?1", "\\", "\n", "\x85", "\u0301", "ə̃",
]  # fmt: skip


def test_any_text_of_a_model_is_a_safe_query_and_a_safe_id(search):
    rng = random.Random(0)
    for number in range(800):
        text = rng.choice(["", " "]).join(rng.choices(HOSTILE, k=rng.randint(1, 6)))
        if number % 50 == 0:
            text *= 5000
        for ask in (search.search, search.read):
            try:
                ask(text)
            except ToolError:
                continue
    assert search.search("tapirs").startswith("1. [zoo]"), "and nothing has changed"


def test_a_query_that_takes_too_long_is_the_models_error(search, monkeypatch):
    monkeypatch.setattr(corpora, "SEARCH_S", -1.0)
    monkeypatch.setattr(corpora, "STEPS", 1)
    with pytest.raises(ToolError, match="use fewer and rarer words"):
        search.search("tapirs")


def test_a_query_that_a_busy_machine_makes_slow_is_no_error_of_the_model(search, monkeypatch):
    monkeypatch.setattr(corpora, "STEPS", 1)
    hours = iter(range(0, 10**9, 3600))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(hours)))
    assert search.search("tapirs").startswith("1. [zoo]")


async def test_an_index_that_is_gone_is_the_infrastructures_failure_and_a_damaged_one_too(search, cache):
    (index,) = (cache / "corpora").glob("*.sqlite")
    whole = index.read_bytes()
    index.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    with pytest.raises(ToolUnavailable, match="cannot be read"):
        search.search("tapirs")
    index.unlink()
    result = await search.call(Call("search", {"query": "tapirs"}, 0))
    assert "ToolUnavailable" in result.failure and not result.output


# The corpus ----------------------------------------------------------------------------------------------------------


def test_a_corpus_may_be_parquet_or_a_folder_of_texts(tmp_path, cache):
    table = pa.Table.from_pylist([{"title": None, **document, "url": "x"} for document in DOCUMENTS])
    parquet.write(tmp_path / "corpus.parquet", table)
    assert "[orla]" in Search(corpus=str(tmp_path / "corpus.parquet")).search("clockmaker")
    folder = tmp_path / "texts"
    (folder / "animals").mkdir(parents=True)
    (folder / "animals" / "tapir.md").write_bytes("Tapirs eat leaves: caf\xe9.".encode("latin-1"))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    texts = Search(corpus=str(folder))
    assert texts.search("leaves").startswith("1. [animals/tapir.md] tapir\nTapirs eat leaves")
    assert texts.read("animals/tapir.md").startswith("tapir (page 1 of 1)\nTapirs eat leaves: caf")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"id": "a", "text": "x"}, {"id": "a", "text": "y"}], "has an id twice: .*Give each document its own"),
        ([{"id": "a", "text": "x"}, {"id": "b"}], "document 2: expected texts in id, title .optional. and text, got"),
        ([{"id": 7, "text": "x"}], "document 1: expected texts"),
        ([{"id": "a", "text": "  "}], "document 1: expected texts"),
        (["no object"], "line 1: .*Expected a JSON object"),
        ([], "has no document"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused_and_leaves_no_index(tmp_path, cache, lines, message):
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=message):
        Search(corpus=str(file))
    assert [path.suffix for path in (cache / "corpora").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corpus": "nowhere.jsonl"}, "does not exist here"),
        ({"corpus": "FOLDER"}, "is a folder without .txt or .md"),
        ({"corpus": "FILE", "top": 0}, "top is 0; expected a whole number from 1 to 100"),
        ({"corpus": "FILE", "page_chars": True}, "page_chars is True"),
        ({"corpus": "FILE", "k": 3}, "got the settings .*k"),
        ({}, "got the settings"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_when_the_run_starts(corpus, tmp_path, settings, message):
    (tmp_path / "empty").mkdir()
    places = {"FOLDER": str(tmp_path / "empty"), "FILE": str(corpus)}
    settings = {name: places.get(value, value) for name, value in settings.items()}
    with pytest.raises(ValueError, match=message):
        Environments({"name": "search", **settings}, None)


def test_a_python_without_full_text_search_is_told_so(corpus, monkeypatch):
    monkeypatch.setattr(corpora, "SCHEMA", corpora.SCHEMA.replace("fts5", "fts99"))
    with pytest.raises(ValueError, match=f"SQLite of this Python .{sqlite3.sqlite_version}. has no full-text search"):
        Search(corpus=str(corpus))


def searching(corpus: Path, query: str) -> subprocess.Popen:
    code = f"from verl_ext.environments.search import Search; print(Search(corpus={str(corpus)!r}).search({query!r}))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_processes_that_start_at_once_share_one_index_and_a_changed_corpus_has_another(corpus, cache):
    assert all("[zoo]" in process.communicate()[0] for process in [searching(corpus, "tapirs") for _ in range(3)])
    files = Counter(path.suffix for path in (cache / "corpora").iterdir())
    assert files == {".sqlite": 1, ".lock": 1}, "and nothing half written"
    corpus.write_text(corpus.read_text().replace("tapirs", "llamas"))
    assert "[zoo]" in Search(corpus=str(corpus)).search("llamas")
    assert len(list((cache / "corpora").glob("*.sqlite"))) == 2


def test_a_process_waits_for_the_one_that_builds_the_index(corpus, cache):
    process = searching(corpus, "tapirs")
    assert "[zoo]" in process.communicate()[0]
    (index,) = (cache / "corpora").glob("*.sqlite")
    (lock,) = (cache / "corpora").glob("*.lock")
    built = index.read_bytes()
    index.unlink()
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = searching(corpus, "tapirs")
        while not any(Path(file.path) == lock for file in psutil.Process(process.pid).open_files()):
            assert process.poll() is None
            time.sleep(0.01)
        index.write_bytes(built.replace(b"Of tapirs", b"OF TAPIRS"))
    assert "OF TAPIRS" in process.communicate()[0], "the index of the one that held the lock"


async def test_episodes_that_are_given_up_leave_nothing_open(corpus, config, give_up):
    me, entry = psutil.Process(), {"name": "search", "corpus": str(corpus)}
    calls = [("search", {"query": "tapirs"}), ("read", {"id": "karst", "page": 2})] * 3
    assert await give_up(entry, config, calls, count=20, within_s=60) == 20, "the threads of the calls have started"
    before = me.num_fds(), len(me.children())
    ended = await give_up(entry, config, calls, within_s=0.01)
    assert ended < 200, "some were given up"
    deadline = time.monotonic() + 30
    while (me.num_fds(), len(me.children())) > before and time.monotonic() < deadline:
        await asyncio.sleep(0.05)  # the thread of a call that was given up still reads
    assert (me.num_fds(), len(me.children())) <= before


# The task ------------------------------------------------------------------------------------------------------------


def test_the_lookup_task_needs_two_documents_and_its_traces_are_what_the_tools_say(tmp_path, cache, monkeypatch):
    import runpy

    monkeypatch.setattr(
        sys, "argv", ["prepare_lookup", "--out", str(tmp_path), "--sft", "8", "--rl", "60", "--test", "8"]
    )
    runpy.run_path(str(Path(__file__).parents[3] / "data" / "prepare_lookup.py"), run_name="__main__")
    search = Search(corpus=str(tmp_path / "corpus.jsonl"))
    rows = parquet.read(tmp_path / "rl_train.parquet").to_pylist() + parquet.read(tmp_path / "eval.parquet").to_pylist()
    assert len(rows) == 68
    for row in rows:
        question, answer = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        what, person = question.split()[2], question.partition("in which ")[2].partition(" lives")[0]
        at = f"person-{person.lower().replace(' ', '-')}"
        assert search.search(person).startswith(f"1. [{at}]")
        about = search.read(at)
        town = about.rpartition("the town of ")[2].rstrip(".")
        assert search.search(town).splitlines()[0].endswith(f"[town-{town.lower()}] {town}")
        assert f" {answer} {what}" in search.read(f"town-{town.lower()}") and f"{what}" not in about
    trace = parquet.read(tmp_path / "sft_train.parquet").to_pylist()[0]
    messages = json.loads(trace["messages"])
    for call, said in zip(messages[1::2], messages[2::2], strict=False):
        function = call["tool_calls"][0]["function"]
        assert getattr(search, function["name"])(**function["arguments"]) == said["content"]
    assert messages[-1]["content"].startswith("\\boxed{")


@pytest.mark.timeout(60)
def test_the_lookup_task_has_names_for_any_number_of_people():
    import prepare_lookup

    every = 18**2  # names of two syllables
    names = [*itertools.islice(prepare_lookup.names(random.Random(0), 2), every + 10)]
    assert len({*names}) == every + 10 and {len(name) for name in names[every:]} == {9}
