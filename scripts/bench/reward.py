"""Measure how fast answers are scored, and whether hostile ones hold up the rest. Exits with 1 if a limit is missed.

    python -m scripts.bench.reward

Ordinary responses are 8,000 characters of prose with two tool calls, 16 to a problem, half of them right. Three out of
four problems have integers as answers, the others formulas, tuples and lists. Limits: a median of 1 ms and a mean of
10 ms of CPU time per ordinary answer, worker processes included; 8,192 responses (one published step) in 60 s; with 10%
hostile ones mixed in, 99% of the ordinary ones are scored within twice the time.
"""

import asyncio
import random
import statistics
import sys
import time

import psutil

from scripts.studies.shared import command_line, cpu_seconds
from verl_ext.datasets.rows import progress_bar
from verl_ext.reward import score_answer
from verl_ext.reward.maths import symbolic
from verl_ext.reward.verifiers.mathematics import MathVerifier

MEDIAN_MS, MEAN_MS, STEP_S, DELAY = 1.0, 10.0, 60.0, 2.0
HOSTILE_SHARE = 0.1
GROUP = 16  # responses to a problem
# (gold, right answers, wrong answers) with three numbers to fill in.
FORMULAS = [
    (
        r"\frac{%d\sqrt{%d}}{%d}",
        [r"%d\sqrt{%d}/%d", r"\dfrac{%d\sqrt{%d}}{%d}"],
        [r"\frac{%d+\sqrt{%d}}{%d}", "%d.%d%d"],
    ),
    ("%dx^2+%dx+%d", ["%dx^{2} + %dx + %d"], ["x(%dx+%d)-%d", "%dx^2-%dx+%d"]),
    (r"(%d, \frac{%d}{%d})", [r"\left(%d,\tfrac{%d}{%d}\right)", "(%d,%d/%d)"], ["(%d, %d)+%d", "[%d, %d/%d]"]),
    (r"%d\pi+\ln(%d)-%d", [r"%d\pi + \ln{%d} - %d"], [r"%d\pi-\ln(%d)+%d"]),
    (r"%d, %d, %d", [r"\{%d, %d, %d\}", r"%d,%d\text{ and }%d"], ["%d, %d", "%d, %d, %d, 0"]),
]
# Refused without computer algebra, except the last two, which run into its limit of CPU time.
HOSTILE = [
    ("9^{9^{9^9}}%d", "42"),
    ("100000!%d", "42"),
    (r"\sum_{k=1}^{10^9} k+%d", "42"),
    ("(" * 500 + "%d" + ")" * 500, "43"),
    ("__import__('os').system('%d')", "42"),
    (r"\frac{1}{" * 200 + "%d" + "}" * 200, "42"),
    ("x+" * 900 + "%d", "x"),
    ("9" * 1900 + "%d", "42"),
    ("x^{20}-%dx+1>0", r"(-\infty,3)\cup(5,\infty)"),
    (r"\sum_{k=1}^{9000} \frac{%d}{k}", r"\sum_{k=1}^{n} k"),
]
PROSE = "We consider the sum over all pairs $(a, b)$ with $a + b \\le 100$, and see that $\\frac{a}{b}$ is at most 3. "
TOOL = "<code>\nprint(sum(k for k in range(100)))\n</code>\n<interpreter>\n4950\n</interpreter>\n"


def make_rows(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Make (response, ground truth) pairs of ordinary responses, by group; half of them are right."""
    draw = random.Random(seed)
    rows = []
    for problem in range(count // GROUP):
        numbers = tuple(draw.sample(range(2, 1000), 3))
        if problem % 4:
            gold, right, wrong = str(numbers[0]), [str(numbers[0])], [str(number) for number in numbers[1:]]
        else:
            formula, *answers = FORMULAS[problem // 4 % len(FORMULAS)]
            gold = fill(formula, numbers)
            right, wrong = ([fill(answer, numbers) for answer in kind] for kind in answers)
        rows += [(respond(draw.choice(draw.choice([right, wrong]))), gold) for _ in range(GROUP)]
    return rows


def fill(formula: str, numbers: tuple[int, int, int]) -> str:
    parts = formula.split("%d")
    return "".join(part + str(number) for part, number in zip(parts, (*numbers, ""), strict=False))


def respond(pred: str) -> str:
    return PROSE * 36 + TOOL + PROSE * 36 + TOOL + rf"The answer is $\boxed{{{pred}}}$."


def cost_per_answer(rows: list[tuple[str, str]]) -> tuple[float, float]:
    """Measure median and mean CPU time per answer, in ms. The median is of this process, where most answers end."""
    score_answer(r"\boxed{\sqrt{16}}", "4")  # starts a worker
    process = psutil.Process()
    each, before = [], cpu_seconds(process)
    for response, gold in rows:
        start = time.process_time()
        score_answer(response, gold)
        each.append(time.process_time() - start)
    return 1000 * statistics.median(each), 1000 * (cpu_seconds(process) - before) / len(rows)


async def score_all(rows: list[tuple[str, str, bool]]) -> tuple[float, float]:
    """Return the seconds until all responses are scored, and until 99% of the ordinary ones are."""
    verifier, ended = MathVerifier({}), []
    start = time.monotonic()

    async def score(response: str, gold: str, ordinary: bool) -> None:
        await verifier.verify(response, gold, {})
        if ordinary:
            ended.append(time.monotonic() - start)

    with progress_bar(total=len(rows), unit="answer") as progress:
        for done in asyncio.as_completed([score(*row) for row in rows]):
            await done
            progress.update()
    return time.monotonic() - start, ended[int(0.99 * len(ended))]


def main() -> int:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--responses", type=int, default=8192, help="of one step")
    parser.add_argument("--hostile", type=int, default=None, help="hostile responses in the mixed step (default: 10%%)")
    arguments = parser.parse_args()
    rows = make_rows(arguments.responses)
    median_ms, mean_ms = cost_per_answer(rows[:2000])
    print(f"CPU per ordinary answer: median {median_ms:.2f} ms, mean {mean_ms:.2f} ms")

    symbolic.POOL.close()
    ordinary = [(*row, True) for row in rows]
    step_s, alone_s = asyncio.run(score_all(ordinary))
    print(f"{len(rows)} responses in {step_s:.1f} s")

    count = int(HOSTILE_SHARE * len(rows)) if arguments.hostile is None else arguments.hostile
    hostile = [
        (respond(pred.replace("%d", str(n))), gold, False)
        for n, (pred, gold) in ((n, HOSTILE[n % len(HOSTILE)]) for n in range(count))
    ]
    symbolic.POOL.close()  # so that nothing is cached from the first time
    mixed = ordinary + hostile
    random.Random(1).shuffle(mixed)
    all_s, mixed_s = asyncio.run(score_all(mixed))
    print(f"with {count} hostile ones: 99% of the ordinary ones in {mixed_s:.1f} s (without: {alone_s:.1f} s), "
          f"all in {all_s:.1f} s")  # fmt: skip
    missed = [
        name
        for name, value, limit in [
            ("median", median_ms, MEDIAN_MS),
            ("mean", mean_ms, MEAN_MS),
            ("step", step_s, STEP_S),
            ("delay", mixed_s, DELAY * alone_s),
        ]
        if value > limit
    ]
    print(f"limits missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
