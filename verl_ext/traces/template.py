"""What `convert` asks a teacher to do with a problem and its text reasoning (ReTool's step, in words of our own)."""

import hashlib

SYSTEM = (
    "You edit solutions of problems. Where a solution calculates by hand, you put a Python program in place of the "
    "calculation. You change nothing else. You do not solve the problem anew, and you do not correct the solution."
)
USER = """Here is a problem with its solution. Rewrite the solution so that calculations are done by Python programs.

1. Look for calculations that are long or easy to get wrong: sums, products, equations, counting, searching, checking \
cases. Leave trivial ones as they are. One to four programs are usual.
2. Put each program where its calculation stood, on lines of its own between <code> and </code>. Each program is a \
whole script: it imports what it needs and prints its result. It computes the result from the numbers of the problem; \
it must not merely print a number that you know.
3. Do not write what a program prints. It is run, and its output is put behind </code>. Continue the text as if the \
reader had just seen that output, and use the numbers as they are printed.
4. Keep all other text word for word: the order of the steps, the names, the numbers, the language.
5. The last line says the answer in \\boxed{{}}.

Answer with the rewritten solution and nothing else.

<problem>
{problem}
</problem>

<solution>
{reasoning}
</solution>"""
EXAMPLE_IN = (
    "A box holds 24 rows of 17 nails, and 9 nails are bent. How many are straight?",
    "First we count all nails. 24 times 17 is 24*10 + 24*7 = 240 + 168 = 408. Then we take away the bent ones: "
    "408 - 9 = 399. So there are 399 straight nails.",
)
EXAMPLE_OUT = """First we count all nails.
<code>
print(24 * 17)
</code>
There are 408 nails. Then we take away the bent ones: 408 - 9 = 399. So there are \\boxed{399} straight nails."""


def messages(problem: str, reasoning: str) -> list[dict[str, str]]:
    """Return the conversation that asks for one rewriting, with one example before it."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": USER.format(problem=EXAMPLE_IN[0], reasoning=EXAMPLE_IN[1])},
        {"role": "assistant", "content": EXAMPLE_OUT},
        {"role": "user", "content": USER.format(problem=problem, reasoning=reasoning)},
    ]


def digest() -> str:
    """Return a hash of the template, which stands in the files that were made with it."""
    return hashlib.sha256("\n".join((SYSTEM, USER, *EXAMPLE_IN, EXAMPLE_OUT)).encode()).hexdigest()[:16]
