"""A model folder's tokenizer and chat template, read without transformers, whose import takes almost three seconds.

It has as much of transformers' interface as the doctor's checks need, and counts the same tokens.
"""

import functools
import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase as Interface
else:
    Interface = object

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_HUB_NAME = re.compile(r"(?!outputs/)\w[\w.-]*(/[\w.-]+)?")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE_SPECIAL = ("extra_special_tokens", "additional_special_tokens")  # the name in transformers 5, and before


class NoTokenizer(ValueError):
    """The path has no tokenizer; the message says why."""


class QuickTokenizer(Interface):
    """The tokenizer that the module's docstring describes; a type checker takes it for one of transformers.

    Args:
        folder: with `tokenizer.json`.
        template: instead of the folder's own chat template.
    Raises:
        NoTokenizer: a file of the folder cannot be read.
    """

    all_special_tokens: list[str]

    def __init__(self, folder: Path, template: str | None = None):
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._tokenizer.no_truncation()  # a saved file may hold either from training; transformers resets both
            self._tokenizer.no_padding()
            config = _read_json(folder / "tokenizer_config.json")
            saved = _read_json(folder / "special_tokens_map.json")  # older folders have the names only there
        except Exception as error:  # tokenizers raises this very class
            raise NoTokenizer(str(error)) from None
        named = {name: config.get(name) or saved.get(name) for name in _SPECIAL}
        more = next((each for file in (config, saved) for key in _MORE_SPECIAL if (each := file.get(key))), {})
        if isinstance(more, dict):  # with names, which templates may use
            named, more = named | more, []
        self._special = {name: _content(each) for name, each in named.items() if each}
        self.all_special_tokens = [*self._special.values(), *map(_content, more)]
        self._tokenizer.add_special_tokens(self.all_special_tokens)
        self.eos_token = self._special.get("eos_token")
        self.chat_template = template or _templates_of(folder, config)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> "dict[int, AddedToken]":
        return self._tokenizer.get_added_tokens_decoder()

    @property
    def all_special_ids(self) -> list[int | None]:
        return [self._tokenizer.token_to_id(token) for token in self.all_special_tokens]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the text; `tokenize` is always false. Raises ValueError if several templates have no default."""
        template = self.chat_template
        if isinstance(template, dict):
            named = template.get("default") if tools is None else template.get("tool_use", template.get("default"))
            if named is None:
                raise ValueError(f"the tokenizer has several chat templates and no default one: {', '.join(template)}")
            template = named
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return _compiled(template).render(**given, **(self._special | kwargs))


class PlainEncoder:
    """Stand-in for `SegmentEncoder`, which needs transformers: tool output is encoded like all other text."""

    def __init__(self, tokenizer: QuickTokenizer):
        self._tokenizer = tokenizer

    def encode(self, parts: Sequence[str]) -> list[int]:
        return self._tokenizer.encode("".join(parts))


def quick_tokenizer(path: str, folder: Path, template: str | None) -> QuickTokenizer | None:
    """Return the tokenizer of a model; None if only transformers can read it, or if it has to come from the hub.

    Args:
        path: of the model: a folder, relative to `folder`, or a name on the hub.
    Raises:
        NoTokenizer: the folder has none.
    """
    place = folder / Path(path).expanduser()
    if (place / "tokenizer.json").is_file():
        return QuickTokenizer(place, template)
    if any((place / name).is_file() for name in FILES) or (not place.is_dir() and _HUB_NAME.fullmatch(path)):
        return None
    kind = "the folder has none of " + ", ".join(FILES) if place.is_dir() else "there is no such folder"
    raise NoTokenizer(kind)


def _templates_of(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Return the folder's chat template, or several ones by name."""
    files = {each.stem: each for each in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (file := folder / "chat_template.jinja").is_file():
        files["default"] = file
    found = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    found = found or config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}
    return found["default"] if isinstance(found, dict) and [*found] == ["default"] else found


def _content(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    """Compile with the options and names on which a chat template may rely (transformers' docs, "Chat templates")."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks what the model wrote, and adds no text."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    world.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    world.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return world.from_string(template)
