"""IFEval's 25 kinds of constraint: real prompts of tests/data/ifeval.jsonl, with answers made by hand."""

import asyncio
import json
from pathlib import Path

import pytest

from verl_ext.reward.verifiers.ifeval import (
    CHECKS,
    IfevalVerifier,
    count_sentences,
    detect_language,
    read_constraints,
)

REPO = Path(__file__).resolve().parents[4]
ROWS = {row["id"]: row for row in map(json.loads, (REPO / "tests/data/ifeval.jsonl").read_text().splitlines())}
SHORT = "Rest well in a hammock"  # 5 words
ENGLISH = "the cat sat on the mat and it was happy with that"

# (IFEval's id of the prompt, answers that meet its constraints, answers that do not)
CASES = [
    ("3615", ["I hum by day. Who am I?"], ["Camilla, who am I?"]),  # no comma
    (
        "3091",
        ["Elephant? elephant; ELEPHANTS!"],
        ["elephant and elephant", "eleph ant " * 3],
    ),  # elephant at least 3 times
    ("2716", ["The job suits me.", "I apply."], ["the job and the firm", "There, the end"]),  # "the" less than 2 times
    ("3595", ["Red petals at dawn", "prettyish"], ["Such Beauty!", "so pretty."]),  # without beauty, pretty
    ("3617", ["NOVA, ZEN AND THE OTHER"], ["NOVA, Zen", "nova", "LE CHAT EST DANS LA MAISON ET NOUS"]),  # capitals
    ("1072", [f"{SHORT} " * 80], [f"{SHORT} " * 79, ""]),  # at least 400 words
    ("2299", ["Kwa nini bwana na bibi wanapenda pete ya dhahabu? Kwa sababu ni ya watu wawili."], [ENGLISH, "12 34"]),
    ("1108", ["ಹ್ಯಾಂಬರ್ಗರ್ ಒಂದು ಸ್ಯಾಂಡ್‌ವಿಚ್ ಆಗಿದೆ"], [ENGLISH, "हैमबर्गर सैंडविच है"]),  # Kannada
    (
        "3653",
        ["विराटनगरमा दश दिनको यात्रा। पहिलो दिन तपाईं बजार जानुहुन्छ र मन्दिर हेर्ने छ।"],
        ["बिराटनगर में दस दिन की यात्रा है और आप बाजार के लिए जाते हैं", ENGLISH],
    ),  # Nepali, not Hindi
    ("2396", ["War went on.\n\nP.P.S It ended.", "p. p. s. it ended"], ["War went on.\nP.S. It ended.", "none"]),
    ("219", ['"Yes, she is."', ' "Yes" '], ["Yes", '"Yes', '"', "'Yes'"]),  # wrapped in double quotation marks
    ("202", ["etchings", ENGLISH], ["Etchings", "le chat est dans la maison et nous", "123"]),  # lowercase
    (
        "2314",
        ["* Rex\n* Max\n- Dot", "Names:\n * Rex\n * Max\n * Dot"],
        ["* Rex\n* Max", "**Rex**\n* a\n* b", "1. a\n2. b\n3. c"],
    ),
    (
        "2921",
        ["It is 2.\n***\nSince 40/20 = 2.", "***\nIt is 2.\n***\nSo."],
        ["It is 2.", "a\n***\nb\n***\nc", "a\n***\n\n***\nb"],
    ),
    ("2925", ["SECTION 1 a SECTION 2 b\nSECTION 3 c"], ["SECTION 1 a\nSECTION 2 b", "Section 1 2 3"]),  # 3 sections
    (
        "1098",
        ["Lord******Father", "\n******\nLord\n******\nFather"],
        ["Lord", "Lord******Lord", "a******b******c", "a******\n******b"],
    ),
    ("3739", ["Envy.", "Jealousy? It is Mr. Green."], ["One. Two. Three.", "a\n\nb\n\nc"]),  # less than 3 sentences
    ("3126", ["Ask [question]."], ["Ask (question).", "Ask [question"]),  # at least 1 placeholder
    ("251", ["helene: cook, six years"], ["nnnnnnn helene"]),  # n less than 7 times; lowercase is not asked for
    ("2662", ["She Engages lightly."], ["She engages.", "lightly"]),
    ("1893", ["Hail the king!\n\nPeace!", '"peace!"'], ["Peace! Out", "peace"]),  # ends with Peace!
    ("2752", ["*Age* is not **it**", "*a* *b* *c*"], ["*Age* alone", "* * and ** **", "*a\nb* *"]),  # 2 highlights
    ("2849", ["A man OF NANTUCKET", "ON A DAY"], ["One DAY", "Nantucket"]),  # at least 2 words in capitals
    ("3719", ["<<Chicken>>\nOh no"], ["<Chicken>", "<<>>", "<<a\nb>>"]),
    ("3755", ["My answer is no."], ["my answer is no", "No."]),
    (
        "13",
        ['{"park": 1867}', '```JSON\n{"park": [1, 2]}\n```', '```\n"x"\n```'],
        ["{park: 1867}", '{"a": 1} so', "", "[" * 9999],
    ),
    (
        "2590",
        ["Send for it.\n\nTwo.\n\nThree.", "'send', a\n\n\n\nb\n\nc"],
        ["Send.\n\nTwo.", "Well.\n\nSend.\n\nc", "Sender a\n\nb\n\nc"],
    ),
    (
        "2355",
        [ROWS["2355"]["constraints"][0]["kwargs"]["prompt_to_repeat"] + " Verily."],
        ["Verily, wherefore?", "Wherefore doth people"],
    ),
]


def verdict(response, row, **settings):
    return asyncio.run(IfevalVerifier({}, **settings).verify(response, {"constraints": row["constraints"]}, {}))


@pytest.mark.parametrize(("prompt", "passing", "failing"), CASES, ids=[case[0] for case in CASES])
def test_answer_meets_the_constraints_of_its_prompt(prompt, passing, failing):
    row = ROWS[prompt]
    for response in passing:
        assert verdict(response, row).acc == 1.0, response
    for response in failing:
        assert verdict(response, row).acc == 0.0, response


def test_every_kind_of_constraint_has_a_real_prompt():
    kinds = {constraint["id"] for prompt, *_ in CASES for constraint in ROWS[prompt]["constraints"]}
    assert kinds == CHECKS.keys()
    assert len(kinds) == 25


def test_character_that_is_no_letter_can_be_counted():
    assert CHECKS["keywords:letter_frequency"]("# # #", letter="#", let_frequency=3, let_relation="at least")


def test_only_what_follows_the_thoughts_counts():
    assert verdict("<think>a, b</think>a b", ROWS["3615"]).acc == 1.0
    assert verdict("a, b `</think>` a b", ROWS["3615"]).acc == 0.0  # only a mention of the tag


def test_share_of_the_constraints_met():
    row = {"constraints": [{"id": "punctuation:no_comma"}, {"id": "startend:quotation", "kwargs": {}}]}
    assert verdict('"a, b"', row).acc == 0.0
    score = verdict('"a, b"', row, all_or_nothing=False)
    assert (score.acc, score.verdict, score.method) == (0.5, "partial", "broken: punctuation:no_comma")


def test_ground_truths_of_both_forms():
    ours = [{"id": "detectable_format:number_bullet_lists", "kwargs": {"num_bullets": 3, "language": None}}]
    theirs = {"instruction_id_list": [ours[0]["id"]], "kwargs": [ours[0]["kwargs"]]}
    expected = [("detectable_format:number_bullet_lists", {"num_bullets": 3})]
    assert read_constraints(json.dumps({"constraints": ours})) == read_constraints(theirs) == expected


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"constraints": []}', {"constraints": [{"id": "no:such"}]}])
def test_ground_truth_without_constraints_is_an_error_of_the_data(broken):
    with pytest.raises(ValueError, match="constraints"):
        read_constraints(broken)


def test_unknown_relation_is_an_error_of_the_data():
    with pytest.raises(ValueError, match="relation is 'at most'"):
        CHECKS["length_constraints:number_words"]("a", num_words=1, relation="at most")


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", 3),
        ("Dr. A. Smith paid $3.50 to Mr. B, i.e. nothing.", 1),
        ('He said "No." Then he left.', 2),
        ("A title\n\nOne sentence", 2),
        ("Wait... what?!", 2),
        ("", 0),
    ],
)
def test_sentences_are_counted(text, sentences):
    assert count_sentences(text) == sentences


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Der Hund ist nicht im Haus und wir sind auch nicht da.", "de"),
        ("El perro no está en la casa y los niños se van con él.", "es"),
        ("Le chien n'est pas dans la maison et nous ne sommes pas là.", "fr"),
        ("Il cane non è nella casa e i bambini sono con lui, ma non con me.", "it"),
        ("O cão não está em casa e os meninos foram com ele para uma festa.", "pt"),
        ("Koira ei ole talossa ja hän on myös siellä, mutta se ei ole totta.", "fi"),
        ("Con chó không có trong nhà và tôi là một người bạn của những người đó.", "vi"),
        ("Кучето не е в къщата и ние сме с него, но това не е така.", "bg"),
        ("Собака не в доме, и я не знаю, что он для нас как друг.", "ru"),
        ("घर में कुत्ता नहीं है और हम उसके साथ हैं, यह सच है।", "hi"),
        ("कुत्रा घरात नाही आणि आम्ही त्याच्या सोबत आहे, हे खरे आहे.", "mr"),
        ("سگ در خانه است و ما با آن هستیم که این را می خواهیم", "fa"),
        ("کتا گھر میں نہیں ہے اور ہم اس کے ساتھ ہیں", "ur"),
        ("الكلب في البيت و هذا من الأصدقاء على الطريق", "ar"),
        ("개는 집에 없습니다", "ko"),
        ("犬は家にいません", "ja"),
        ("狗不在家", "zh"),
        ("কুকুর বাড়িতে নেই", "bn"),
        ("ਕੁੱਤਾ ਘਰ ਵਿੱਚ ਨਹੀਂ ਹੈ", "pa"),
        ("નમસ્તે, તમે કેમ છો", "gu"),
        ("நாய் வீட்டில் இல்லை", "ta"),
        ("కుక్క ఇంట్లో లేదు", "te"),
        ("หมาไม่อยู่บ้าน", "th"),
        ("ഒരു കപ്പ് കാപ്പി തരൂ", "ml"),
        ("Jag vill gärna ha en kopp kaffe, tack.", "sv"),
        ("मैं Python में एक program लिख रहा हूँ जो numbers को sort करता है", "hi"),  # with the words of its field
        ("123", None),
        ("xyzzy", None),
        ("हैलो hello mixed मिश्रित", None),
    ],
)
def test_language_is_told_and_a_mixed_or_short_text_has_none(text, language):
    assert detect_language(text) == language
