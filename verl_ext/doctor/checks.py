"""All checks, in the order in which they run, each with what it needs; the cheap ones make up the quick part."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from verl_ext.doctor import (
    agent,
    batch,
    checkpoints,
    config,
    data,
    domains,
    machine,
    memory,
    names,
    places,
    sandbox,
    template,
    terms,
    values,
    versions,
)
from verl_ext.doctor.finding import Finding, Level, fail, warn
from verl_ext.doctor.run import Run
from verl_ext.doctor.tokens import NoTokenizer, quick_tokenizer
from verl_ext.runs.machine import Machine


class Need(Enum):
    """What a check needs; the quick part has three seconds of CPU time."""

    SETTINGS = "the composed configuration, and the sources that it names"
    MACHINE = "what this machine says of itself"
    FILES = "the run's files, of which the quick part reads samples"
    TOKENIZER = "files, and the model's tokenizer, which the quick part makes without transformers"
    SERVER = "one request to each server"
    VERL = "an import of verl and torch"
    LOAD = "seconds of load on a server"


EXPENSIVE = (Need.VERL, Need.LOAD)


@dataclass
class Examination:
    """What the checks receive."""

    run: Run
    is_quick: bool
    gpu_gib: float | None = None
    load_seconds: float = 5.0
    failed: set[str] = field(default_factory=set)  # topics
    why_no_tokenizer: str = ""

    @cached_property
    def machine(self) -> Machine:
        return Machine.here()

    @cached_property
    def tokenizer(self) -> Any:
        """Return transformers' tokenizer, or a `QuickTokenizer`; None without one, which `_check_tokenizer` reports."""
        run, path = self.run, self.run.get(f"{self.run.model}.tokenizer_path") or self.run.model_path
        try:
            if self.is_quick:
                return quick_tokenizer(str(path), run.folder, run.get(f"{run.model}.custom_chat_template"))
            return template.load_tokenizer(run)
        except (NoTokenizer, OSError, ValueError, TypeError, KeyError) as error:
            self.why_no_tokenizer = (str(error) or type(error).__name__).splitlines()[0]
            return None


def _check_tokenizer(exam: Examination) -> Iterator[Finding]:
    if exam.tokenizer is not None:
        yield from template.check_tokenizer(exam.run, exam.tokenizer)
    elif exam.why_no_tokenizer:
        yield fail(f"""there is no tokenizer at {exam.run.model_path}: {exam.why_no_tokenizer}
            -> Set MODEL_PATH of the launcher to a model folder. Without a tokenizer, neither the chat template nor the
            lengths of texts are checked.""")


def _check_agreement(exam: Examination) -> Iterable[Finding]:
    from verl_ext.doctor import agreement  # imports verl

    return agreement.check_agreement(exam.run, exam.tokenizer) if exam.tokenizer is not None else ()


def _check_play(exam: Examination) -> Iterable[Finding]:
    return agent.check_play(exam.run, exam.tokenizer) if exam.tokenizer is not None else ()


def _check_domains(exam: Examination) -> Iterable[Finding]:
    return domains.check_domains(exam.run, exam.tokenizer) if exam.tokenizer is not None else ()


def _check_rows(exam: Examination) -> Iterable[Finding]:
    from verl_ext.doctor import rows  # 0.4 s, which SFT and RL without files do not need

    usable = None if "template" in exam.failed else exam.tokenizer
    return rows.check_rows(exam.run, usable, is_quick=exam.is_quick)


# (topic, what it needs, the check). After a FAIL of its topic an expensive check is left out.
CHECKS: tuple[tuple[str, Need, Callable[[Examination], Iterable[Finding]]], ...] = (
    ("versions", Need.SETTINGS, lambda exam: versions.check_versions(exam.run)),
    ("versions", Need.SETTINGS, lambda exam: versions.check_external_modules(dict(os.environ))),
    ("config", Need.SETTINGS, lambda exam: config.check_config(exam.run)),
    ("config", Need.SETTINGS, lambda exam: config.check_verifiers(exam.run)),
    ("names", Need.SETTINGS, lambda exam: names.check_names(exam.run)),
    ("values", Need.SETTINGS, lambda exam: values.check_values(exam.run)),
    ("batch", Need.SETTINGS, lambda exam: batch.check_batch(exam.run)),
    ("time-outs", Need.SETTINGS, lambda exam: sandbox.check_timeouts(exam.run)),
    ("machine", Need.MACHINE, lambda exam: machine.check_gpus(exam.run, exam.machine)),
    ("machine", Need.MACHINE, lambda exam: machine.check_limits(exam.run, exam.machine)),
    ("machine", Need.MACHINE, lambda exam: machine.check_ray(exam.run, exam.machine)),
    ("machine", Need.FILES, lambda exam: places.check_temporary(exam.run, os.environ)),
    ("names", Need.FILES, lambda exam: places.check_loggers(exam.run, os.environ)),
    ("data", Need.FILES, lambda exam: data.check_files(exam.run)),
    ("data", Need.FILES, lambda exam: data.check_agent_names(exam.run)),
    ("data", Need.FILES, lambda exam: data.check_protocol(exam.run)),
    ("reward", Need.FILES, lambda exam: terms.check_terms(exam.run)),
    ("agent", Need.FILES, lambda exam: agent.check_start(exam.run)),
    ("memory", Need.MACHINE, lambda exam: memory.check_memory(exam.run, exam.machine, exam.gpu_gib)),
    ("checkpoints", Need.FILES, lambda exam: checkpoints.check_steps(exam.run)),
    ("checkpoints", Need.FILES, lambda exam: places.check_output(exam.run)),
    ("checkpoints", Need.FILES, lambda exam: checkpoints.check_disk(exam.run)),
    ("checkpoints", Need.FILES, lambda exam: checkpoints.check_resume(exam.run)),
    ("sandbox", Need.SERVER, lambda exam: sandbox.check_reachable(exam.run)),
    ("config", Need.VERL, lambda exam: config.check_reward(exam.run)),
    ("data", Need.FILES, lambda exam: data.check_code_tests(exam.run, is_quick=exam.is_quick)),
    ("template", Need.TOKENIZER, _check_tokenizer),
    ("template", Need.VERL, _check_agreement),
    ("domains", Need.FILES, lambda exam: domains.check_sources_of_rows(exam.run)),
    ("domains", Need.VERL, _check_domains),
    ("agent", Need.VERL, _check_play),
    ("data", Need.TOKENIZER, _check_rows),
    ("sandbox", Need.LOAD, lambda exam: sandbox.check_load(exam.run, seconds=exam.load_seconds)),
)


def examine(exam: Examination) -> Iterator[Finding]:
    """Yield the findings of all checks, or of the cheap ones, as they come."""
    yield from look(exam, "machine", lambda: exam.machine and ())  # no finding, except that it cannot be looked at
    is_seen = "machine" in vars(exam)
    for topic, need, check in CHECKS:
        is_left_out = need in EXPENSIVE and (exam.is_quick or topic in exam.failed)
        if not is_left_out and (is_seen or need is not Need.MACHINE):
            yield from look(exam, topic, lambda check=check: check(exam))


def look(exam: Examination, topic: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check; an error of the check itself is also a finding, and stops no run.

    If a setting is already a FAIL, such as a text instead of a number, a check that raises because of it says nothing.
    """
    is_told = bool(exam.failed & {"config", "values"})
    try:
        for finding in check():
            if finding.level == Level.FAIL:
                is_told = True
                exam.failed.add(topic)
            yield replace(finding, topic=topic)
    except Exception as error:
        if not is_told:
            text = f"a check raised {type(error).__name__}: {error} -> Report this as a bug in verl_ext.doctor."
            yield replace(warn(text), topic=topic)
