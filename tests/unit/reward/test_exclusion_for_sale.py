r"""Exclusion is not for sale: what a response's own text or code causes is its error, never "unknown", never a raise.

To add a way: one line in ANSWERS (a boxed answer and a gold that is plain by itself) or in one of the tables below. A
way that kept a sample out of training must end as "wrong", "no_answer" or, if it is right after all, "correct".
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from aiohttp import web

from verl_ext.reward import score_answer
from verl_ext.reward.maths import symbolic
from verl_ext.reward.maths.extraction import extract_answer
from verl_ext.reward.verifiers.code import CodeVerifier
from verl_ext.reward.verifiers.exact import ChoiceVerifier, ExactVerifier
from verl_ext.reward.verifiers.ifeval import CHECKS
from verl_ext.sandbox.limits import SERVER_NAME

ANSWERS = [
    # towers and huge exponents
    (r"\pi^{9999!}", "42"),
    (r"\sqrt{2}^{9999!}", "42"),
    (r"x^{9999!}", "42"),
    (r"x^{9999!}", "x^2"),
    (r"e^{e^{e^{99}}}", "42"),
    (r"\exp(\exp(\exp(99)))", "42"),
    (r"\exp(\exp(\exp(\exp(9))))", r"\sqrt{2}"),
    (r"\pi^{\pi^{\pi^{\pi^{\pi^{\pi}}}}}", "42"),
    (r"2^{\pi^{99}}", r"\sqrt{2}"),
    (r"(1+\sqrt{2})^{99999}", "42"),
    (r"(1+\sqrt{2})^{9999}-(1-\sqrt{2})^{9999}", r"\sqrt{2}"),
    (r"(x+y+z+1)^{9999}", "x+y+z"),
    (r"(x+1)^{9999}-(x+1)^{9998}", "x"),
    (r"i^{i^{i^{9999}}}", "42"),
    (r"x^{x^{x^{x^{99}}}}", "x"),
    # factorials and binomials
    (r"\binom{\pi}{9999}", "42"),
    (r"\binom{9999!}{999}", "42"),
    (r"\binom{9999!}{9999}", "42"),
    (r"\binom{\sqrt{2}}{9999}+1", r"\sqrt{2}"),
    (r"\binom{x}{9999}", "x"),
    (r"\binom{9999}{\binom{9999}{999}}", "42"),
    (r"\sqrt{9999!}", "42"),
    (r"\ln(9999!)!", "42"),
    (r"(9999!+\pi)!", "42"),
    (r"\frac{9999!+\sqrt{2}}{9998!}", r"\sqrt{2}"),
    # transcendental functions of huge numbers
    (r"\cos(\exp(\exp(12)))", "42"),
    (r"\sin(\exp(\exp(12)))", r"\sin(1)"),
    (r"\tan(\exp(9^{9999}))", "42"),
    (r"\sin(9999!)", "42"),
    (r"\sin(\pi^{9999!})", "42"),
    (r"\cos(9999!\pi+\sqrt{2})", r"\sqrt{2}"),
    (r"\ln(\ln(\exp(\exp(\exp(99)))))", "42"),
    (r"\log_{9999!}(9998!)", "42"),
    (r"\arctan(\exp(\exp(30)))", r"\pi"),
    # nested radicals
    (r"\sqrt{2+\sqrt{3+\sqrt{5+\sqrt{7+\sqrt{11+\sqrt{13}}}}}}", r"\sqrt{2}"),
    (r"\sqrt[9999]{9999!+\pi}", "42"),
    (r"\sqrt[9999!]{2}", "42"),
    (r"\sqrt[3]{2+\sqrt{5}}^{9999}+\sqrt[3]{2-\sqrt{5}}^{9999}", "42"),
    # sums, products, integrals and limits that the gold also has
    (r"\sum_{k=1}^{9^{9}} \frac{1}{k}", r"\sum_{k=1}^{9} k"),
    (r"\sum_{k=1}^{9999!} \frac{1}{k}", r"\sum_{k=1}^{9} k"),
    (r"\prod_{k=1}^{99999999} (k+\pi)", r"\prod_{k=1}^{3} k"),
    (r"\int_0^1 \sin(\exp(x^{99}))\exp(\cos(x^{77})) dx", r"\int_0^1 x dx"),
    (r"\int_0^{\infty} \frac{\sin(x^{7})\ln(x)}{x^{5}+x+1} dx", r"\int_0^1 x dx"),
    (r"\lim_{x\to 0} \frac{\sin(\tan(x))^{99}-\tan(\sin(x))^{99}}{x^{99}}", r"\lim_{x\to 0} x"),
    # inequalities and sets
    (r"x^{20}-3x+1>0", r"(-\infty,3)\cup(5,\infty)"),
    (r"\sin(x)+\cos(3x)+x^{7}>1", r"x>1"),
    (r"x^{9999}>1", "x>1"),
    (r"|x-1|+|x-2|+|x-3|+|x-4|<x^{7}", "x>1"),
    (r"\frac{x^{9}+1}{x^{11}-x-1}\le \sqrt{x+2}", r"[1,2]"),
    (r"\{\pi^{9999!}, 2\}", r"\{1,2\}"),
    (r"(\pi^{9999!}, 2)", "(1,2)"),
    # matrices, long lists, deep nesting
    (r"\begin{pmatrix} \pi^{9999!} & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    (r"\begin{pmatrix}" + "&".join(["x"] * 900) + r"\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    (", ".join(rf"\sqrt{{{n}+a}}" for n in range(8)), ", ".join(rf"\sqrt{{{n}+b}}" for n in range(8))),
    (", ".join(rf"\sqrt{{{n}+a}}" for n in range(30)), "(" + ",".join(rf"\sqrt{{{n}}}+a" for n in range(30)) + ")"),
    ("(" * 900 + "1" + ")" * 900, "42"),
    ("{" * 900 + "1" + "}" * 900, "x+1"),
    ("(1," * 600 + "1" + ")" * 600, "(1,(1,2))"),
    (r"\{" * 400 + "1" + r"\}" * 400, r"\{1,2\}"),
    (r"\frac{1}{1+" * 9 + "x" + "}" * 9, r"\frac{1}{x}"),
    (r"|" * 8 + "x" + "|" * 8, "|x|"),
    ("x=" * 900 + "1", "1"),
    ("2^" * 900 + "1", "4"),
    ("-" * 1900 + "1", "1"),
    (r"\pm " * 300 + "1", "1"),
    (r"1\pm\pi^{9999!}", r"1\pm\sqrt{2}"),
    # digits and unicode
    ("0." + "1" * 1900, r"\sqrt{2}"),
    ("1e4000", r"\sqrt{2}"),
    ("9" * 1999, r"\sqrt{2}"),
    ("1" * 5000, "2" * 2600),
    ("1." + "3" * 50 + r"\pi^{9999!}", r"\pi"),
    ("²" * 500, "42"),
    ("x" + "⁹" * 30, "x"),
    ("½" * 400, r"\sqrt{2}"),
    ("π⁹⁹⁹⁹!", "42"),
    ("\u202e\u0000\ud800x", "x"),
    ("９" * 1900, "42"),
    ("۹" * 20, "9"),
    ("①" * 40, "x"),
    # piecewise, floor, mod
    (r"\begin{cases} x^{9999!} & x>0 \\ 1 & x\le 0 \end{cases}", "x"),
    (r"\lfloor \pi^{9999!} \rfloor", "42"),
    (r"\lceil \exp(\exp(\exp(9))) \rceil", "42"),
    (r"\lfloor \sqrt{2}\cdot 9999! \rfloor", r"\lfloor \sqrt{2} \rfloor"),
    (r"|\pi^{9999!}-1|", "42"),
    (r"\exp(9999!)\bmod 7", r"3\bmod 7"),
    (r"\gcd(9999!, 9998!+1)", r"\gcd(4,6)"),
    # right answers that cost a lot may be wrong or right, but are decided
    (r"\cos(\exp(\exp(12)))^2+\sin(\exp(\exp(12)))^2", "1"),
    (r"\exp(\exp(\exp(99)))-\exp(\exp(\exp(99)))", "0"),
]


@pytest.fixture(scope="module")
def scores():
    """Future of the score of each answer; two at a time, because each lane of the pool has two workers.

    A sixth of the usual CPU time, so that costly answers fail sooner; enough for the golds above.
    """
    pool = symbolic.SymbolicPool(cpu_s=0.3)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(symbolic, "is_equal", pool.is_equal)
        yield {row: threads.submit(score_answer, rf"So \boxed{{{row[0]}}}", row[1]) for row in ANSWERS}
    pool.close()


@pytest.mark.timeout(180)  # the first answers wait for the workers' imports, on a busy machine for a minute
@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: ascii(row[0])[1:40])
def test_answer_is_decided(scores, row):
    assert scores[row].result().verdict in ("wrong", "no_answer", "correct")


# (text, how often it is repeated, what ends it): 60,000 characters or so, on which each check must take linear time.
TEXTS = [
    (text, 60_000 // len(text), end)
    for text in (
        "[",
        "\n",
        "\n ",
        ".",
        "!",
        "...x",
        "*",
        "**a",
        "[a",
        "<<",
        "-",
        "- \n",
        "(",
        '"',
        "\r",
        "a",
        "क्षा",
        "é",
        "\\",
        "~~~a",
    )
    for end in ("", "x")
]
TEXTS += [
    ("*", 1, "a" * 60_000),
    ("**", 1, "a" * 60_000),
    ("[", 1, "a" * 60_000),
    (r"\text{", 8_000, ""),
    ("```", 20_000, "x"),
]
ARGUMENTS = {
    "keywords": ["ab"], "keyword": "ab", "frequency": 1, "relation": "at least", "forbidden_words": ["ab"],
    "letter": "a", "let_frequency": 1, "let_relation": "at least", "language": "en", "num_sentences": 3,
    "num_paragraphs": 1, "num_words": 3, "nth_paragraph": 1, "first_word": "a", "num_placeholders": 3,
    "postscript_marker": "P.P.S", "num_bullets": 3, "num_highlights": 3, "section_spliter": "SECTION",
    "num_sections": 3, "prompt_to_repeat": "a", "end_phrase": "a", "capital_frequency": 3,
    "capital_relation": "at least",
}  # fmt: skip
TEXT_CPU_S = 1.0  # of one check; a quadratic one takes half a minute


def checks_of_texts():
    """Return every check that sees a whole response, by its name."""
    for name, check in CHECKS.items():
        names = check.__code__.co_varnames[1 : check.__code__.co_argcount]
        yield name, lambda text, check=check, names=names: check(text, **{key: ARGUMENTS[key] for key in names})
    yield "extract_answer", extract_answer
    for verifier in (ExactVerifier({}), ChoiceVerifier({})):
        yield type(verifier).__name__, lambda text, verifier=verifier: asyncio.run(verifier.verify(text, "C", {}))


@pytest.mark.parametrize(("text", "times", "end"), TEXTS, ids=lambda value: ascii(value)[:20])
def test_text_holds_up_no_check(text, times, end):
    for name, check in checks_of_texts():
        start = time.process_time()
        check(text * times + end)
        assert time.process_time() - start < TEXT_CPU_S, name


# What a server answers to a program that says EVIL, while it runs others properly; and the verdict.
KILLED = {"status": "Finished", "stdout": "", "stderr": "", "return_code": -9, "execution_time": 0.1}
SANDBOXES = [
    ("killed, says the server", {"status": "Failed", "message": "", "run_result": KILLED}, "wrong"),
    ("HTTP 413: too large", 413, "wrong"),
    ("HTTP 422: not a program", 422, "wrong"),
    ("lost, without a verdict", {"status": "SandboxError", "message": "lost"}, "unknown"),
    ("no answer that can be read", {}, "unknown"),
    ("HTTP 500", 500, "unknown"),
    ("HTTP 503: the server is busy", 503, "unknown"),
    ("HTTP 429: too many requests", 429, "unknown"),
]
TEST_CASES = {"inputs": ["1"], "outputs": ["2"]}
RAN = {"status": "Finished", "stdout": "42\n", "stderr": "", "return_code": 0, "execution_time": 0.1}


def verify_by(answer, everything=False, cases=TEST_CASES, **settings):
    """The score of a program that says EVIL, by a server that answers it so, and with `everything` any other.

    `answer` may also be a coroutine function that gets the standard input.
    """

    async def run_code(request: web.Request) -> web.Response:
        body = await request.json()
        if everything or "EVIL" in body["code"]:
            if callable(answer):
                return await answer(body["stdin"])
            return web.Response(status=answer) if isinstance(answer, int) else web.json_response(answer)
        return ran()

    async def run():
        app = web.Application()
        app.add_routes([web.post("/run_code", run_code)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = {"max_attempts": 2, "backoff_s": 0.001, "timeout_s": 1.0} | settings
        verifier = CodeVerifier({}, urls=[url], **client)
        try:
            return await verifier.verify("```python\nEVIL\n```", cases, {})
        finally:
            await verifier.aclose()
            await runner.cleanup()

    return asyncio.run(run())


def ran(outcome="Success", **result):
    return web.json_response({"status": outcome, "message": "", "run_result": RAN | result})


@pytest.mark.parametrize(("name", "answer", "verdict"), SANDBOXES, ids=[name for name, *_ in SANDBOXES])
def test_program_that_a_server_blames_or_refuses_is_wrong(name, answer, verdict):
    assert verify_by(answer).verdict == verdict


@pytest.mark.parametrize(
    ("times_out", "server", "acc", "verdict"),
    [(True, SERVER_NAME, 1 / 3, "partial"), (False, SERVER_NAME, None, "unknown"), (True, "", None, "unknown")],
    ids=["one test timed out", "none did", "one did, but the server is not ours"],
)
def test_test_that_finds_no_worker_counts_as_failed_if_another_one_timed_out(times_out, server, acc, verdict):
    """The first test held the workers, the second passes, and the third finds none."""

    async def answer(stdin: str) -> web.Response:
        if stdin == "1" and times_out:
            return ran("Failed", status="TimeLimitExceeded", stdout="", return_code=None)
        return web.Response(status=503, headers={"Server": server}) if stdin == "3" else ran()

    score = verify_by(answer, cases={"inputs": ["1", "2", "3"], "outputs": ["42"] * 3}, queue_timeout_s=0.1)
    assert (score.acc, score.verdict) == (acc and pytest.approx(acc), verdict)


def test_tests_that_wait_for_each_other_do_not_wait_for_the_sandbox():
    """Three of 0.2 s one after the other, where a call may wait for 0.1 s."""

    async def answer(stdin: str) -> web.Response:
        await asyncio.sleep(0.2)
        return ran()

    cases = {"inputs": ["1", "2", "3"], "outputs": ["42"] * 3}
    assert verify_by(answer, cases=cases, max_concurrency=1, queue_timeout_s=0.1, timeout_s=10.0).verdict == "correct"


def test_sandbox_that_is_gone_is_not_waited_for_by_each_test_of_a_response():
    asked = []

    async def answer(stdin: str) -> web.Response:
        asked.append(stdin)
        return web.Response(status=500)

    cases = {"inputs": [str(i) for i in range(40)], "outputs": ["42"] * 40}
    assert verify_by(answer, cases=cases, max_concurrency=2).verdict == "unknown"
    assert len(set(asked)) <= 4


@pytest.mark.parametrize("answer", [{"status": "SandboxError", "message": "lost"}, 500], ids=str)
def test_sandbox_that_loses_every_program_is_an_infrastructure_failure(answer):
    score = verify_by(answer, everything=True)
    assert (score.acc, score.verdict) == (None, "unknown") and "sandbox_failure" in score.method


def test_request_that_is_refused_for_every_program_is_our_error():
    with pytest.raises(ValueError, match="HTTP 404"):
        verify_by(404, everything=True)
