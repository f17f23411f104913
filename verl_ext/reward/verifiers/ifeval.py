"""Instruction following: the 25 kinds of constraint of IFEval (arXiv:2311.07911), as its authors' code checks them.

The checks are rewritten rather than imported, because the original needs NLTK's data from the network, and langdetect,
which draws at random. Each check follows the original's rule or says how it differs. All are deterministic and offline.

A ground truth is a mapping or its JSON: {"constraints": [{"id": "punctuation:no_comma", "kwargs": {}}, ...]}, or
IFEval's own {"instruction_id_list": [...], "kwargs": [...]}.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from verl_ext.protocols.thinking import after_thinking
from verl_ext.reward.score import Score

CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
# ISO 639-1 codes of the languages that langdetect, the original's detector, tells apart; IFEval asks for no others.
LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh"
).split()
POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}  # markers that stand for several spellings
MIN_CONFIDENCE = 0.8  # of a language; mixed texts and single words stay below
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|e\.g|i\.e|Inc|Ltd|Ph\.D|[A-HJ-Z])\.")
# A match begins where a run of marks begins and never backtracks into it: linear even in a response of only dots.
_SENTENCE_END = re.compile(r"(?<![.!?。！？।])[.!?。！？।]++[\"'”’)\]]*+(?=\s|$)|\n\s*\n")


class IfevalVerifier:
    """`acc` is 1 if all constraints of the row are met, else 0; with `all_or_nothing=False`, the share of those met."""

    def __init__(self, config: Mapping[str, Any], *, all_or_nothing: bool = True):
        self._all_or_nothing = all_or_nothing

    async def verify(self, response_text: str, ground_truth: Any, sample: Mapping[str, Any]) -> Score:
        constraints = read_constraints(ground_truth)
        response = after_thinking(response_text, unfinished=True)
        if not response.strip():
            return Score(0.0, "", "no_answer", "empty")
        broken = [name for name, kwargs in constraints if not CHECKS[name](response, **kwargs)]
        share = 1.0 - len(broken) / len(constraints)
        acc = float(not broken) if self._all_or_nothing else share
        return Score.graded(acc, "", "broken: " + ", ".join(broken) if broken else "all met")


def read_constraints(ground_truth: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return (id, arguments) of each constraint; see the top of this file.

    Raises:
        ValueError: there is no constraint, or one is not among the 25.
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
        raise ValueError(f"Unknown constraints {unknown} among {len(pairs)}: expected some of {', '.join(CHECKS)}.")
    return pairs


def _compare(count: int, relation: str, threshold: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"The relation is {relation!r}: expected 'at least' or 'less than'. Check the data row.")
    return count >= threshold if relation == "at least" else count < threshold


def _count(pattern: str, response: str, flags: int = 0) -> int:
    return len(re.findall(pattern, response, flags))


def detect_language(text: str) -> str | None:
    """Return the language of most of `text`, one of LANGUAGES; None if it is mixed or too short to tell."""
    language, confidence = _language_identifier().classify(text)
    return language if confidence >= MIN_CONFIDENCE else None


@cache
def _language_identifier() -> Any:
    """Load py3langid's identifier, whose model is in its package, when the first row asks for a language."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(LANGUAGES)
    return identifier


def is_english(response: str) -> bool:
    """Return whether a response is English or in no certain language, as a few words in capitals may be."""
    return detect_language(response) in ("en", None)


def count_sentences(text: str) -> int:
    """Count stretches that end in `.`, `!` or `?` before white space, or at an empty line; the original uses Punkt."""
    text = _ABBREVIATION.sub(lambda match: match[0].replace(".", ""), text)
    return sum(bool(re.search(r"\w", part)) for part in _SENTENCE_END.split(text))


def number_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Require exactly this many paragraphs, divided by `***`; only the first and the last may be empty."""
    paragraphs = [part.strip() for part in re.split(r"\s?\*\*\*\s?", response)]
    paragraphs = paragraphs[not paragraphs[0] : len(paragraphs) - (len(paragraphs) > 1 and not paragraphs[-1])]
    return all(paragraphs) and len(paragraphs) == num_paragraphs


def nth_paragraph_first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Require exactly this many paragraphs, divided by empty lines, the nth of which begins with the word."""
    paragraphs = [part.strip() for part in response.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def json_format(response: str) -> bool:
    text = re.sub(r"^```(?:json)?|```$", "", response.strip(), flags=re.IGNORECASE).strip()
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str) -> bool:
    """Require a line with something between its first `<<` and its last `>>`."""
    lines = ((line, line.find("<<"), line.rfind(">>")) for line in response.split("\n"))
    return any(line[start:end].strip("<>").strip() for line, start, end in lines if 0 <= start <= end - 3)


def two_responses(response: str) -> bool:
    """Require two different responses with `******` between them; only the first and the last part may be empty."""
    parts = [part.strip() for part in response.split("******")]
    responses = [part for part in parts if part]
    return len(responses) == 2 and responses[0] != responses[1] and all(parts[1:-1])


# The check of a response for each id, with the arguments that IFEval gives it. A count means "at least" unless a
# relation or a comment says otherwise.
CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda response, keywords: all(
        re.search(re.escape(keyword), response, re.IGNORECASE) for keyword in keywords
    ),
    "keywords:frequency": lambda response, keyword, frequency, relation: _compare(
        _count(re.escape(keyword), response, re.IGNORECASE), relation, frequency
    ),
    "keywords:forbidden_words": lambda response, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)
    ),
    # Case is ignored. A non-letter such as "#" is counted as well; the original draws a random letter instead.
    "keywords:letter_frequency": lambda response, letter, let_frequency, let_relation: _compare(
        response.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": lambda response, language: detect_language(response) == language,
    "length_constraints:number_sentences": lambda response, num_sentences, relation: _compare(
        count_sentences(response), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": lambda response, num_words, relation: _compare(
        _count(r"\w+", response), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    # Text after the last closing bracket of a line cannot be a placeholder and is not searched.
    "detectable_content:number_placeholders": lambda response, num_placeholders: (
        num_placeholders <= sum(_count(r"\[.*?\]", line[: line.rfind("]") + 1]) for line in response.split("\n"))
    ),
    "detectable_content:postscript": lambda response, postscript_marker: bool(
        re.search(POSTSCRIPTS.get(postscript_marker) or re.escape(postscript_marker.lower()), response.lower())
    ),
    # Exactly this many lines begin with `*` (but not `**`) or `-`.
    "detectable_format:number_bullet_lists": lambda response, num_bullets: (
        num_bullets == _count(r"^[^\S\n]*+(?:\*[^*]|-).*$", response, re.MULTILINE)
    ),
    "detectable_format:constrained_response": lambda response: any(each in response for each in CONSTRAINED_RESPONSES),
    # `*highlighted*` or `**highlighted**` stretches of a line.
    "detectable_format:number_highlighted_sections": lambda response, num_highlights: (
        num_highlights <= _count(r"\*\*[^\S\n]*+[^\n*]++\*\*|\*[^\S\n]*+[^\n*]++\*", response)
    ),
    "detectable_format:multiple_sections": lambda response, section_spliter, num_sections: (
        num_sections <= _count(rf"{re.escape(section_spliter.strip())}\s?\d+", response)
    ),
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": lambda response, prompt_to_repeat: (
        response.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda response, end_phrase: (
        response.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda response: bool(re.fullmatch(r'\s*".*"\s*', response, re.DOTALL)),
    "change_case:capital_word_frequency": lambda response, capital_frequency, capital_relation: _compare(
        sum(word.isupper() for word in re.findall(r"[\w'-]+", response)), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda response: response.isupper() and is_english(response),
    "change_case:english_lowercase": lambda response: response.islower() and is_english(response),
    "punctuation:no_comma": lambda response: "," not in response,
}
