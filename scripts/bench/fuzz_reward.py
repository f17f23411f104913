"""Feed random bytes, LaTeX and mutated answers to the scorer, and stop at the first crash, hang or leak.

    python -m scripts.bench.fuzz_reward  # 10 minutes; --seconds and --seed

Every score must come with a verdict, within the limits of CPU time, and without executing an answer; an answer that is
an integer other than the gold must never be right; memory and open files must not grow. On a failure the script prints
the seed and the input, and exits with 1.
"""

import os
import random
import resource
import sys
import time

from scripts.studies.shared import command_line
from verl_ext.reward import score_answer
from verl_ext.reward.maths import symbolic
from verl_ext.reward.maths.symbolic import CPU_S, QUICK_CPU_S

OWN_CPU_S = 2.0  # of this process, per response
WALL_S = 30.0 + 2 * CPU_S + QUICK_CPU_S  # per response and its gold, on a machine that also does other things
GROWTH_MB = 200  # of this process, once warm
VERDICTS = {"correct", "wrong", "no_answer", "unknown"}
MARK = "FUZZ_PWNED"
PIECES = r"""
\boxed{ } { ( ) [ ] \{ \} $ \( \) \frac \dfrac \sqrt \sqrt[3] ^ _ ! | , ; : . ' " ` ~ < > = \le \ne \in \cup \pm \infty
\pi \sin \log \ln \sum_{k=1}^n \int_0^1 \lim \binom \begin{pmatrix} \end{pmatrix} & \\ \text{ \text{or} \left \right
\overline{ \ldots \cdot \times + - * / 0 1 2 42 9999 0.5 1e9 x y n i e C % \% ^\circ cm million and or not ½ ２ − √ 元
<code> </code> <interpreter> </interpreter> <tool_call> </tool_call> <think> </think> <answer> </answer> ```python ```
""".split()
CODE = [f"__import__('os').mkdir('{MARK}')", f'open("{MARK}","w")', f"exec(\"open('{MARK}','w')\")"]
GOLDS = [
    *("42", "-7", r"\frac{3}{4}", r"3\sqrt{13}", "1,-2", "(1,2)", "[0,1)", "x^2+1", "x>5", r"\text{odd}", "C", r"28\%"),
    *(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "204_5", "y=2x+3", r"\frac{x^2}{2}+C", r"(-\infty,1)\cup(2,\infty)"),
]


def make_response(draw: random.Random) -> tuple[str, str]:
    """Make (response, ground truth); one in three answers is a gold with a few characters changed."""
    gold = draw.choice(GOLDS)
    kind = draw.randrange(6)
    if kind == 0:
        text = draw.randbytes(draw.randrange(300)).decode("utf-8", errors="replace")
    elif kind == 1:
        text = "".join(chr(draw.choice([draw.randrange(32, 127), draw.randrange(0x2000)])) for _ in range(80))
    elif kind == 2:
        text = draw.choice(PIECES) * draw.choice([3, 30, 3000])
    elif kind == 3:
        text = draw.choice(["", "42+", "x="]) + draw.choice(CODE)
    else:
        pieces = list(gold) if kind == 4 else draw.choices(PIECES, k=draw.randrange(1, 40))
        for _ in range(draw.randrange(4)):
            pieces.insert(draw.randrange(len(pieces) + 1), draw.choice(PIECES))
        text = draw.choice(["", " "]).join(pieces)
    return (rf"\boxed{{{text}}}" if draw.random() < 0.8 else text), gold


def check(response: str, gold: str) -> str | None:
    """Score one response; return what is wrong with the outcome, or None."""
    cpu, wall = time.process_time(), time.monotonic()
    score = score_answer(response, gold)
    if score.verdict not in VERDICTS or (score.acc is None) != (score.verdict == "unknown"):
        return f"not a proper verdict: {score}"
    if time.process_time() - cpu > OWN_CPU_S or time.monotonic() - wall > WALL_S:
        return f"took {time.process_time() - cpu:.1f} s of CPU, {time.monotonic() - wall:.1f} s: {score}"
    pred = score.pred.removeprefix("-")
    if (
        score.acc == 1.0
        and pred.isascii()
        and pred.isdigit()
        and gold.lstrip("-").isdigit()
        and int(score.pred) != int(gold)
    ):
        return f"another integer is right: {score}"
    if os.path.exists(MARK):
        return "the answer was executed"
    return None


def memory_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 1e6


def fuzz(seconds: float, seed: int) -> str | None:
    """Score random responses for `seconds`; return the first failure, or None."""
    draw = random.Random(seed)
    started = shown = time.monotonic()
    count, warm = 0, None
    while time.monotonic() - started < seconds:
        response, gold = make_response(draw)
        try:
            failure = check(response, gold)
        except Exception as error:  # any exception is a crash
            failure = f"raised {error!r}"
        count += 1
        if failure:
            return f"seed {seed}, response {count}: {failure}\nresponse: {response!r}\nground truth: {gold!r}"
        if warm is None and count == 2000:
            warm = memory_mb(), len(os.listdir("/proc/self/fd"))
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{shown - started:.0f} s: {count} responses, {memory_mb():.0f} MB", flush=True)
    if warm and (memory_mb() - warm[0] > GROWTH_MB or len(os.listdir("/proc/self/fd")) > warm[1] + 10):
        return f"grew from {warm} MB and files to {memory_mb():.0f}, {len(os.listdir('/proc/self/fd'))}"
    print(f"{count} responses scored, {memory_mb():.0f} MB, {len(symbolic.POOL.worker_pids())} workers: no failure")
    return None


def main() -> int:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None, help="default: a different one each time")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    failure = fuzz(arguments.seconds, seed)
    if failure:
        print(f"FAILED: {failure}")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
