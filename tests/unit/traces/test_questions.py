"""`questions`: what each kept question holds, checked by other means, and every reason to drop a candidate."""

import asyncio
import contextlib
import json
import re
import shlex
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests import linked_corpus
from tests.chat_endpoint import ChatEndpoint, Refused, serving
from verl_ext.environments.corpus import open_corpus
from verl_ext.environments.search import Search
from verl_ext.protocols.base import Call
from verl_ext.reward.verifiers import Verifiers
from verl_ext.traces.__main__ import main
from verl_ext.traces.chains import Documents


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RETOOL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def linked(tmp_path_factory) -> Path:
    """A corpus of 500 documents."""
    return linked_corpus.write(tmp_path_factory.mktemp("it's, {linked}") / "corpus.jsonl", 100)


@pytest.fixture(scope="module")
def rows(linked) -> list[dict[str, Any]]:
    """Its questions; their traces lie next to them."""
    out = linked.with_name("questions.parquet")
    with contextlib.redirect_stdout(linked.with_name("printed.txt").open("w")) as printed, printed:
        main(["questions", str(linked), "--out", str(out), "--n", "220"])
    return pq.read_table(out).to_pylist()


@pytest.fixture
def make(tmp_path, capsys):
    """Make questions of documents (id -> title, text); returns the rows and reason -> count."""

    def run(corpus: dict[str, tuple[str, str]] | Path, *options: str) -> tuple[list[dict], Counter[str]]:
        if not isinstance(corpus, Path):
            lines = [json.dumps({"id": id, "title": each[0], "text": each[1]}) for id, each in corpus.items()]
            corpus = Path(tempfile.mkdtemp(dir=tmp_path)) / "corpus.jsonl"  # a process opens a path once
            corpus.write_text("\n".join(lines))
        out = tmp_path / "out.parquet"
        out.unlink(missing_ok=True)
        try:
            main(["questions", str(corpus), "--out", str(out), "--hops", "2", *options])
        except SystemExit as stop:
            if not re.search("No question was found|could not be asked", str(stop)):
                raise
        counts = re.findall(r"^(\w+) +(\d+)$", capsys.readouterr().out, re.MULTILINE)  # one number of hops
        rows = pq.read_table(out).to_pylist() if out.exists() else []
        return rows, Counter({reason: int(count) for reason, count in counts})

    return run


# What a kept question holds --------------------------------------------------------------------------------------


def words(text: str) -> str:
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def test_a_small_corpus_gives_two_hundred_questions_of_two_and_three_hops(rows):
    assert Counter(row["extra_info"]["hops"] for row in rows) == {2: 110, 3: 110}
    kinds = {tuple(id.partition("-")[0] for id in row["extra_info"]["documents"]) for row in rows}
    assert kinds >= {("person", "town"), ("town", "founder"), ("founder", "log"), ("person", "town", "founder")}
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows)
    assert [row["extra_info"]["index"] for row in rows] == [*range(220)]


def test_only_the_last_document_has_the_answer_and_it_does_not_name_the_first(rows, linked):
    documents = {each["id"]: each for each in map(json.loads, linked.read_text().splitlines())}
    for row in rows:
        answer, ids = words(row["reward_model"]["ground_truth"]), row["extra_info"]["documents"]
        having = [id for id, each in documents.items() if answer in words(f"{each['title']} . {each['text']}")]
        assert having == ids[-1:]
        assert words(documents[ids[0]]["title"]) not in words(documents[ids[-1]]["text"])
        question = words(row["prompt"][0]["content"])
        assert words(documents[ids[0]]["title"]) in question
        assert not [each for each in (answer, *(words(documents[id]["title"]) for id in ids[1:])) if each in question]


@pytest.mark.nightly
def test_the_tools_lead_to_the_answer_by_words_that_are_known_and_no_search_of_the_question_does(rows, linked):
    async def play(row: dict[str, Any]) -> None:
        question = row["prompt"][0]["content"].rpartition("\nThe answer format")[0]
        *_, last = ids = row["extra_info"]["documents"]
        search = Search(corpus=str(linked))
        await search.open({"raw_prompt": row["prompt"]})
        known, read, output = words(question), [], ""
        for number, call in enumerate(json.loads(row["extra_info"]["gold_calls"])):
            said = await search.call(Call(call["name"], call["arguments"], number))
            assert not said.error
            if call["name"] == "read":
                assert f"[{call['arguments']['id']}] " in output
                read.append(call["arguments"]["id"])
            else:
                assert words(call["arguments"]["query"]) in known
            output = said.output
            known += words(output)
        assert list(dict.fromkeys(read)) == ids
        assert row["reward_model"]["ground_truth"] in output
        clues = re.findall('"([^"]+)"', question)
        assert len(clues) == len(ids)
        for query in (question, *clues, question.partition(" says ")[0].removeprefix("The document about ")):
            assert f"[{last}] " not in (await search.call(Call("search", {"query": query}, 99))).output

    async def play_all() -> None:
        for row in rows:
            await play(row)

    asyncio.run(play_all())


def test_the_verifier_of_a_row_without_settings_is_the_one_for_texts(rows):
    row = rows[0]
    verifier = Verifiers({}).find(row["data_source"], row["ability"])
    assert type(verifier).__name__ == "ExactVerifier"
    gold = verifier.gold(row["reward_model"]["ground_truth"])
    assert asyncio.run(verifier.verify(gold, row["reward_model"]["ground_truth"], row)).acc == 1.0


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(rows, linked, make):
    def asked(rows: list[dict]) -> list[str]:
        return [row["prompt"][0]["content"] for row in rows if row["extra_info"]["hops"] == 2]

    again, _ = make(linked, "--n", "10")
    assert asked(again) == asked(rows)[:10]
    other, _ = make(linked, "--n", "10", "--seed", "1")
    assert asked(other) != asked(again) and len(other) == 10


def test_every_document_is_looked_at_once(linked):
    with Documents(open_corpus(str(linked)), 1500) as documents:
        orders = [[*documents.order(seed)] for seed in range(5)]
    assert all(sorted(order) == [*range(1, 501)] for order in orders)
    assert len({tuple(order[:3]) for order in orders}) == 5


def test_the_traces_pass_the_check_that_is_printed_for_them(rows, linked, check):
    *_, command = linked.with_name("printed.txt").read_text().splitlines()
    traces, *options = shlex.split(command.removeprefix("retool traces check "))
    assert traces == str(linked.with_name("questions.traces.parquet"))
    kept, left_out, _ = check(Path(traces), *(options[2:-2]))  # without --config and --out
    assert len(kept) == len(rows) and not left_out


# Reasons to drop -------------------------------------------------------------------------------------------------

ORLA = "Orla Venn is a potter and for many years has lived in the town of Karst."
KARST = "Karst is a town on a plain. According to the last count, it has 4213 inhabitants."
# towns that nothing leads to, so that a search for a town lists others
OTHERS = {f"t{n}": (f"Town{n}", KARST.replace("Karst", f"Town{n}").replace("4213", str(5000 + n))) for n in range(20)}
GOOD = OTHERS | {"orla": ("Orla Venn", ORLA), "karst": ("Karst", KARST)}


def test_the_plain_case_is_kept(make):
    (row,), counts = make(GOOD)
    assert counts == {"kept": 1, "no_chain": 21}
    assert row["reward_model"]["ground_truth"] == "4213"
    question = (
        'The document about Orla Venn says "a potter and for many years has lived in the town of (1)". The document '
        'about (1) says "it has (2) inhabitants". What is (2), as it is written there?'
    )
    assert row["prompt"][0]["content"].startswith(f"{question}\nThe answer format")
    assert row["extra_info"]["documents"] == ["orla", "karst"]


def with_texts(**texts: str) -> dict[str, tuple[str, str]]:
    return GOOD | {id: (GOOD[id][0], text) for id, text in texts.items()}


TWO_NUMBERS = f"{KARST} According to the first count, it has 4000 inhabitants."
OF_KARSTS = {f"k{n}": ("Karst Karst Karst", "Karst, Karst and Karst.") for n in range(6)}
DROPPED = {  # name of the case -> (reason, documents)
    "the last document names the first": ("single_document", with_texts(karst=f"{KARST} The potter Orla Venn left.")),
    "a rare word finds the last": ("one_search", with_texts(karst=KARST.replace("inhabitants", "cormorants"))),
    "a search lists others": ("path_broken", GOOD | OF_KARSTS),
    "the answer is also elsewhere": ("answer_ambiguous", GOOD | {"log": ("Log", "A clerk counted 4213 barrels.")}),
    "two answers fit": ("no_clue", with_texts(karst=TWO_NUMBERS)),
    "the first title has the second": ("gives_away", GOOD | {"orla": ("Orla Karst", ORLA)}),
    "a title is there twice": ("no_chain", GOOD | {"other": ("Karst", "Karst is also a rock.")}),
    "the first has no title": ("no_chain", GOOD | {"orla": ("", ORLA)}),
}


@pytest.mark.parametrize("case", DROPPED)
def test_a_candidate_is_dropped_for_its_reason(make, case):
    reason, corpus = DROPPED[case]
    rows, counts = make(corpus)
    assert not rows and counts[reason] >= 1


def test_a_page_that_ends_in_the_middle_of_an_answer_breaks_the_path(make):
    start = KARST.index("4213")
    corpus = with_texts(karst=f"{KARST[:28]}{'x' * (98 - start - 1)} {KARST[28:]}")
    assert corpus["karst"][1].index("4213") == 98
    assert len(make(corpus)[0]) == 1
    rows, counts = make(corpus, "--page-chars", "100")
    assert not rows and counts["path_broken"] == 1


def test_a_document_that_names_one_beyond_the_next_is_a_shortcut(make):
    corpus = with_texts(karst="Karst was founded by Mira Toll in spring.")
    born = "{} was born, as is known, in the cold year {}."
    corpus |= {f"m{n}": (f"Mira{n} Toll", born.format(f"Mira{n} Toll", 1800 + n)) for n in range(20)}
    corpus["mira"] = ("Mira Toll", born.format("Mira Toll", 1744))
    assert len(make(corpus, "--hops", "3")[0]) == 1
    corpus["orla"] = ("Orla Venn", f"{ORLA} Mira Toll is an ancestor.")
    rows, counts = make(corpus, "--hops", "3")
    assert not rows and counts["shortcut"] == 1


def test_a_document_ends_at_most_three_questions(make):
    people = {f"p{n}": (f"Orla Venn{n}x", f"Orla Venn{n}x has lived in the town of Karst.") for n in range(5)}
    rows, counts = make(GOOD | people)
    assert len(rows) == 3 and counts["too_many"] == 3


def test_links_of_markup_and_shared_names_lead_on(make):
    text = "It left the harbour at noon, and the {} carried {} barrels of oil."
    logs = {f"l{n}": (f"Log {n}", text.format(f"Ship{n}", 828012 + n)) for n in range(20)}
    logs["log"] = ("Log 77", text.format("Nurjintam", 700000))
    logs["low"] = ("low dyke", KARST.replace("Karst", "Dyke").replace("4213", "4999"))
    cases = {
        "a potter in [[Karst]] with a kiln.": "karst",
        "a potter in [[Karst|that town]] with a kiln.": "karst",
        "a potter in [[low dyke|a hamlet]] with a kiln.": "low",  # its title has no capital
        "a potter in [a hamlet](karst.md) with a kiln.": "",  # nobody finds Karst by "a hamlet"
        "a potter in [Karst](karst) with a kiln.": "karst",
        "a potter in [Karst](./karst.md#houses) with a kiln.": "karst",
        "a potter, and sailed on the Nurjintam as a child.": "log",
    }
    for text, last in cases.items():
        rows, _ = make(with_texts(orla=f"Orla Venn is {text}") | logs)
        found = {
            id for row in rows for id in row["extra_info"]["documents"] if row["extra_info"]["documents"][0] == "orla"
        }
        assert found == ({"orla", last} if last else set()), text


# A teacher -------------------------------------------------------------------------------------------------------


@pytest.fixture
def teach(make):
    """Make questions with a teacher who says the same to all; returns also what it was asked."""
    with serving(ChatEndpoint(str)) as endpoint:

        def run(said: Any) -> tuple[list[dict], Counter[str], list[str]]:
            def say(messages: list[dict]) -> Any:
                if isinstance(said, Refused):
                    raise said
                return said

            endpoint.say = say
            endpoint.requests.clear()
            rows, counts = make(GOOD, "--chat", endpoint.url)
            asked = [body["messages"][-1]["content"] for body in endpoint.requests]
            return rows, counts, [text for text in asked if text != "Say yes."]

        yield run


QUESTION = "How many people live where the potter Orla Venn does?"


def test_a_teacher_sees_a_sentence_of_each_document_and_words_the_question(teach):
    (row,), _, (asked,) = teach(QUESTION)
    assert row["prompt"][0]["content"].startswith(QUESTION)
    assert "1. Orla Venn is a potter and for many years has lived in the town of **Karst**" in asked
    assert "2. According to the last count, it has **4213** inhabitants" in asked and "on a plain" not in asked
    rows, _, asked = teach(QUESTION)
    assert len(rows) == 1 and not asked  # it is asked nothing twice


SAID = {
    "no_start": "How many people live in the potter's town?",
    "gives_away": "How many people live in Karst, where Orla Venn lives?",
    "refused": {"content": None, "refusal": "I will not."},
}


@pytest.mark.parametrize("reason", SAID)
def test_what_a_teacher_says_passes_the_same_checks(teach, reason):
    rows, counts, _ = teach(SAID[reason])
    assert not rows and counts[reason] == 1


def test_a_request_that_fails_is_asked_again_by_the_next_start(teach):
    rows, counts, _ = teach(Refused(500, "no", {"Retry-After-Ms": "1"}))
    assert not rows and counts["not_asked"] == 1
    rows, _, asked = teach(QUESTION)
    assert len(rows) == 1 and len(asked) == 1


def test_options_that_cannot_be_are_refused(make, tmp_path):
    for options, message in ((["--hops", "1"], "--hops are"), (["--n", "0"], "--n is"), (["--top", "0"], "top is 0")):
        with pytest.raises(SystemExit, match=message):
            main(["questions", str(tmp_path), "--out", str(tmp_path / "x.parquet"), *options])
