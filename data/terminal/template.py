"""What a template draws from and what it makes, and the task that comes of it.

A template is a function of a kind's module: `Draw` -> `Made`. The expected result is computed here in Python, not by
the commands of the reference solution, so that running these proves both.
"""

import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from terminal import words
from verl_ext.tasks import archive
from verl_ext.tasks.task import BoxTask

KINDS = (
    "files text archives git csv_json logs permissions packages sqlite regex schedules programs"
).split()  # fmt: skip
TEST_SHARE = 10  # one of so many instances of a template is for tests only
CHECK = Path(__file__).with_name("check.py").read_text()
Item = TypeVar("Item")


class Draw:
    """Random names, words and numbers of one instance; files, folders and people are each drawn once."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self._used: set[str] = set()

    def fresh(self, pool: Sequence[str]) -> str:
        """Return a word that this instance does not use yet."""
        while (word := self.rng.choice(pool)) in self._used:
            pass
        self._used.add(word)
        return word

    def some(self, pool: Sequence[str], count: int) -> list[str]:
        return [self.fresh(pool) for _ in range(count)]

    def file(self, ending: str = "txt") -> str:
        return f"{self.fresh(words.STEMS)}.{ending}"

    def folder(self) -> str:
        return self.fresh(words.FOLDERS)

    def path(self) -> str:
        """Return a folder in a folder."""
        return f"{self.folder()}/{self.folder()}"

    def pick(self, items: Sequence[Item]) -> Item:
        return self.rng.choice(items)

    def number(self, low: int, high: int) -> int:
        """Return a whole number, both ends included."""
        return self.rng.randint(low, high)

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        return self.rng.sample(items, len(items))

    def lines(self, low: int = 4, high: int = 12) -> list[str]:
        """Return different lines of two to four words."""
        return list(
            {" ".join(self.rng.sample(words.WORDS, self.number(2, 4))): 0 for _ in range(self.number(low, high))}
        )

    def text(self) -> str:
        return text(self.lines())


def text(lines: Sequence[Any]) -> str:
    """Return lines as the content of a file."""
    return "".join(f"{line}\n" for line in lines)


def script(path: str, code: str) -> str:
    """Return the command that writes a file of several lines."""
    return f"cat > {path} <<'EOF'\n{code.strip()}\nEOF"


@dataclass(frozen=True)
class Made:
    """One instance of a template; paths are relative to /app.

    Attributes:
        say: the instruction, in several wordings.
        files: path -> content, as `archive.pack` takes them.
        steps: bash commands that solve it, one call each.
        checks: [name of a function of check.py, path, expected, ...]; their paths are the artifacts.
    """

    say: Sequence[str]
    files: dict[str, archive.Entry | bytes | str | tuple[str, int]]
    steps: list[str]
    checks: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Template:
    """A template: its kind is its module, its difficulty that of the steps: 1 easy, 2 or 3 medium, more hard."""

    kind: str
    name: str
    difficulty: str
    make: Callable[[Draw], Made]


@dataclass(frozen=True)
class Instance:
    """An instance of a template, as drawn."""

    template: Template
    instruction: str
    made: Made

    @property
    def key(self) -> str:
        return f"{self.template.kind}/{self.template.name}/{self.instruction}"

    @property
    def is_test(self) -> bool:
        """Whether it belongs to the tests, whatever the seed: no instance with its instruction is in training."""
        return zlib.crc32(self.key.encode()) % TEST_SHARE == 0

    def task(self) -> BoxTask:
        """Return the task; its name has a digest of all that it holds."""
        made, checks = self.made, json.dumps(self.made.checks, ensure_ascii=False)
        image = archive.pack({f"app/{path}": entry for path, entry in made.files.items()}) if made.files else b""
        solve = "".join(f"{step}\n" for step in ("#!/bin/bash", "cd /app", *made.steps))
        digest = blake2b(image + self.key.encode() + checks.encode(), digest_size=4).hexdigest()
        return BoxTask(
            name=f"{self.template.kind}-{self.template.name.replace('_', '-')}-{digest}",
            instruction=self.instruction,
            image=image,
            tests=archive.pack({"check.py": CHECK, "expected.json": checks, "test.sh": TEST}, "tests"),
            artifacts=_artifacts(made.checks),
            solution=archive.pack({"solution/solve.sh": solve}),
            kind=self.template.kind,
            difficulty=self.template.difficulty,
        )

    def calls(self) -> list[dict[str, Any]]:
        """Return the calls of the reference solution."""
        return [{"name": "bash", "arguments": {"command": step}} for step in self.made.steps]


TEST = "#!/bin/bash\nexec python3 -I -B /tests/check.py\n"
TEMPLATES: dict[str, Template] = {}  # kind/name -> template, once `load` was called


def template(difficulty: str) -> Callable[[Callable[[Draw], Made]], Callable[[Draw], Made]]:
    """Make a function a template."""

    def register(make: Callable[[Draw], Made]) -> Callable[[Draw], Made]:
        kind = make.__module__.rpartition(".")[2]
        TEMPLATES[f"{kind}/{make.__name__}"] = Template(kind, make.__name__, difficulty, make)
        return make

    return register


def load() -> list[Template]:
    """Return all templates, by kind in the order of KINDS."""
    for kind in KINDS:
        import_module(f"terminal.{kind}")
    return list(TEMPLATES.values())


def instances(template: Template, seed: int | str) -> Iterator[Instance]:
    """Yield instances without end, the same ones for a seed; no two have one instruction."""
    rng, seen = random.Random(f"{seed}/{template.kind}/{template.name}"), set()
    misses = 0
    while misses < 1000:
        made = template.make(Draw(rng))
        instruction = rng.choice(made.say)
        if instruction in seen:
            misses += 1
            continue
        misses = 0
        seen.add(instruction)
        yield Instance(template, instruction, made)
    raise ValueError(f"{template.kind}/{template.name} has only {len(seen):,} instances. Ask for fewer.")


def _artifacts(checks: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    """Return the paths of the checks, without those below another."""
    paths = sorted({check[1] for check in checks})
    if "." in paths:
        return ("/app",)
    return tuple(f"/app/{path}" for path in paths if not any(path.startswith(f"{other}/") for other in paths))
