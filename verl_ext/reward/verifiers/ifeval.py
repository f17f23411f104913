"""Instruction following: the 25 kinds of constraint of IFEval (arXiv:2311.07911), as its authors' code checks them.

Written anew rather than imported: the original needs NLTK's data from the network, and langdetect, which draws at
random. Each check follows the original's rule; where one differs, it says so. All are deterministic and offline.

Ground truths, as a mapping or as its JSON: {"constraints": [{"id": "punctuation:no_comma", "kwargs": {}}, ...]}, or
IFEval's own {"instruction_id_list": [...], "kwargs": [...]}.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from verl_ext.reward.score import Score

CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
# ISO 639-1 codes of the languages that langdetect, the original's detector, tells apart; all that IFEval asks for.
LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh"
).split()
MIN_CONFIDENCE = 0.8  # of a language; mixed texts and single words stay below
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|e\.g|i\.e|Inc|Ltd|Ph\.D|[A-HJ-Z])\.")
# Begins where a run of marks begins, and gives nothing of it back: linear also in a response of nothing but dots.
_SENTENCE_END = re.compile(r"(?<![.!?。！？।])[.!?。！？।]++[\"'”’)\]]*+(?=\s|$)|\n\s*\n")


class IfevalVerifier:
    """`acc` is 1 if all constraints of the row are met and 0 otherwise, or with `all_or_nothing=False` their share."""

    def __init__(self, config: Mapping[str, Any], *, all_or_nothing: bool = True):
        self._all_or_nothing = all_or_nothing

    async def verify(self, response_text: str, ground_truth: Any, sample: Mapping[str, Any]) -> Score:
        constraints = read_constraints(ground_truth)
        response = response_text.rpartition("</think>")[2]
        if not response.strip():
            return Score(0.0, "", "no_answer", "empty")
        broken = [name for name, kwargs in constraints if not CHECKS[name](response, **kwargs)]
        share = 1.0 - len(broken) / len(constraints)
        acc = float(not broken) if self._all_or_nothing else share
        verdict = "correct" if acc == 1.0 else "partial" if acc > 0.0 else "wrong"
        return Score(acc, "", verdict, "broken: " + ", ".join(broken) if broken else "all met")


def read_constraints(ground_truth: Any) -> list[tuple[str, dict[str, Any]]]:
    """(id, arguments) of each constraint; see the top of this file.

    Raises:
        ValueError: there is none, or one is not among the 25.
    """
    data = ground_truth
    try:
        data = json.loads(data) if isinstance(data, str) else data
        if "constraints" in data:
            pairs = [(c["id"], c.get("kwargs") or {}) for c in data["constraints"]]
        else:
            pairs = list(zip(data["instruction_id_list"], data["kwargs"], strict=True))
        # A parquet file fills in None for the arguments of other constraints.
        pairs = [(name, {key: value for key, value in kwargs.items() if value is not None}) for name, kwargs in pairs]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"The ground truth {str(ground_truth)[:200]!r} is not a list of constraints ({error!r}): expected JSON "
            "with `constraints` of `id` and `kwargs`, or with `instruction_id_list` and `kwargs`. Check the data row."
        ) from error
    unknown = [name for name, _ in pairs if name not in CHECKS]
    if unknown or not pairs:
        raise ValueError(f"Unknown constraints {unknown} of {len(pairs)}: expected some of {', '.join(CHECKS)}.")
    return pairs


def _compare(count: int, relation: str, threshold: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"The relation is {relation!r}: expected 'at least' or 'less than'. Check the data row.")
    return count >= threshold if relation == "at least" else count < threshold


def existence(response: str, keywords: list[str]) -> bool:
    return all(re.search(re.escape(keyword), response, re.IGNORECASE) for keyword in keywords)


def frequency(response: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(len(re.findall(re.escape(keyword), response, re.IGNORECASE)), relation, frequency)


def forbidden_words(response: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(response: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Case ignored. Also for what is no letter, such as "#", for which the original draws some letter at random."""
    return _compare(response.lower().count(letter.lower()), let_relation, let_frequency)


def detect_language(text: str) -> str | None:
    """The language of most of `text`, one of LANGUAGES; None if it is mixed or too short to tell."""
    language, confidence = _language_identifier().classify(text)
    return language if confidence >= MIN_CONFIDENCE else None


@cache
def _language_identifier() -> Any:
    """py3langid's, whose model is in its package: loaded when the first row asks for a language."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(LANGUAGES)
    return identifier


def response_language(response: str, language: str) -> bool:
    return detect_language(response) == language


def count_sentences(text: str) -> int:
    """Stretches that end in `.`, `!` or `?` before white space, or at an empty line. The original: NLTK's Punkt."""
    text = _ABBREVIATION.sub(lambda match: match[0].replace(".", ""), text)
    return sum(bool(re.search(r"\w", part)) for part in _SENTENCE_END.split(text))


def number_sentences(response: str, num_sentences: int, relation: str) -> bool:
    return _compare(count_sentences(response), relation, num_sentences)


def number_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Exactly so many, divided by `***`; an empty one is allowed at either end only."""
    paragraphs = [part.strip() for part in re.split(r"\s?\*\*\*\s?", response)]
    paragraphs = paragraphs[not paragraphs[0] : len(paragraphs) - (len(paragraphs) > 1 and not paragraphs[-1])]
    return all(paragraphs) and len(paragraphs) == num_paragraphs


def number_words(response: str, num_words: int, relation: str) -> bool:
    return _compare(len(re.findall(r"\w+", response)), relation, num_words)


def nth_paragraph_first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly so many paragraphs, divided by empty lines, the nth of which begins with the word."""
    paragraphs = [part.strip() for part in response.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def number_placeholders(response: str, num_placeholders: int) -> bool:
    # What follows the last bracket that closes a line's cannot be one, and is not searched.
    return (
        sum(len(re.findall(r"\[.*?\]", line[: line.rfind("]") + 1])) for line in response.split("\n"))
        >= num_placeholders
    )


def postscript(response: str, postscript_marker: str) -> bool:
    pattern = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(
        postscript_marker, re.escape(postscript_marker.lower())
    )
    return bool(re.search(pattern, response.lower()))


def number_bullet_lists(response: str, num_bullets: int) -> bool:
    """Exactly so many lines that begin with `*` (but not `**`) or `-`."""
    return len(re.findall(r"^[^\S\n]*+(?:\*[^*]|-).*$", response, re.MULTILINE)) == num_bullets


def constrained_response(response: str) -> bool:
    return any(option in response for option in CONSTRAINED_RESPONSES)


def number_highlighted_sections(response: str, num_highlights: int) -> bool:
    """At least so many `*highlighted*` or `**highlighted**` stretches of a line."""
    highlight = r"\*\*[^\S\n]*+[^\n*]++\*\*|\*[^\S\n]*+[^\n*]++\*"
    return len(re.findall(highlight, response)) >= num_highlights


def multiple_sections(response: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


def json_format(response: str) -> bool:
    text = re.sub(r"^```(?:json)?|```$", "", response.strip(), flags=re.IGNORECASE).strip()
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str) -> bool:
    """A line with something between its first `<<` and its last `>>`."""
    lines = ((line, line.find("<<"), line.rfind(">>")) for line in response.split("\n"))
    return any(line[start:end].strip("<>").strip() for line, start, end in lines if 0 <= start <= end - 3)


def two_responses(response: str) -> bool:
    """Two different ones, with `******` between them; an empty one is allowed at either end only."""
    parts = [part.strip() for part in response.split("******")]
    responses = [part for part in parts if part]
    return len(responses) == 2 and responses[0] != responses[1] and all(parts[1:-1])


def repeat_prompt(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(response: str, capital_frequency: int, capital_relation: str) -> bool:
    words = re.findall(r"[\w'-]+", response)
    return _compare(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def english_capital(response: str) -> bool:
    """All in capitals, and in no other language: words in capitals are too few to tell English by at times."""
    return response.isupper() and detect_language(response) in ("en", None)


def english_lowercase(response: str) -> bool:
    return response.islower() and detect_language(response) in ("en", None)


def no_comma(response: str) -> bool:
    return "," not in response


def quotation(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
