"""What a text mentions, and the clause around a mention."""

import pytest

from verl_ext.traces.mentions import Mention, answers, clue, markup_links, names, possible_titles


def at(text: str, name: str) -> Mention:
    start = text.index(name)
    return Mention(start, start + len(name), name, name)


def test_answers_are_dates_numbers_and_names_but_no_parts_of_others():
    text = (
        "Orla Venn left on 3 May 1744 with 4,213 coins. By 1801-02-03, Mira Toll had 2.5 of [12](a.md), in B7 and 7/8."
    )
    assert [each.name for each in answers(text)] == ["3 May 1744", "4,213", "1801-02-03", "Mira Toll", "2.5", "B7"]


def test_a_run_of_capitals_that_begins_a_sentence_is_no_name():
    text = "Then Orla went. Karst is old. At noon in Old Karst, she met Mira Toll of Zan. In Fen, it rained."
    assert [each.name for each in names(text)] == ["Old Karst", "Mira Toll", "Zan"]


def test_a_part_of_a_longer_name_may_be_no_title():
    found = {each.name for group in possible_titles("She saw New Karst Bridge. In Karst it rains.") for each in group}
    assert "New Karst Bridge" in found and "Karst it rains" in found
    assert not found & {"Karst Bridge", "New Karst", "Bridge"}


def test_links_of_wiki_and_markdown():
    found = markup_links("[[Karst]], [[Old Town#Houses|there]], [a mill](../b/mill.md#top), ![no](picture.png)")
    assert [(each.name, each.target) for each in found] == [
        ("Karst", "Karst"),
        ("Old Town", "Old Town"),
        ("a mill", "../b/mill.md#top"),
    ]


CLUES = {
    "the clause": ("It rained. In spring, it had 17 bridges, and more.", "it had (1) bridges"),
    "the sentence, if the clause is short": ("She left the valley, in 17. It rained.", "She left the valley, in (1)"),
    "without markup": (
        'The **mill** of [[Zan|that man]] had "17" `big` bells.',
        "The mill of that man had '(1)' big bells",
    ),
    "two places fit": ("It had 17 bridges. It had 18 bridges.", None),
    "too few words": ("17", None),
    "a cell of a table": ("| many bridges here | 17 | other bridges there |", None),
}


@pytest.mark.parametrize("case", CLUES)
def test_a_clue_is_what_surrounds_a_mention(case):
    text, expected = CLUES[case]
    assert clue(text, at(text, "17"), "(1)") == expected
