import asyncio

import pytest
from arithmetic import evaluate, plain, run


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        *(("2 + 3 * 4", 14), ("(2 + 3) * 4", 20), ("7 / 2", 3.5), ("8 / 2", 4.0), ("7 // 2", 3), ("7 % 4", 3)),
        *(("-3 + 5", 2), ("+3", 3), (".5 * 4", 2.0), ("a * b - 1", 11)),
    ],
)
def test_values_and_their_types_are_pythons(expression, value):
    result = evaluate(expression, {"a": 3, "b": 4})
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("__import__('os').system('true')", "expected arithmetic on numbers"),
        ("2 ** 8", "expected arithmetic on numbers"),  # 9 ** 9 ** 9 would not end
        ("True + 1", "expected arithmetic on numbers"),
        ("x + 1", "expected arithmetic on numbers, found 'x'"),
        ("1 / 0", "division by zero in '1 / 0'"),
        ("1e200 * 1e200", "above"),
        ("2 +", "no expression"),
        ("(" * 5000 + "1" + ")" * 5000, "no expression"),
    ],
)
def test_all_else_is_refused(expression, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        evaluate(expression)


def test_a_program_assigns_and_prints():
    assert run("# a comment\na = 48 / 2\nb = a + 48\nprint(b)\nprint(1)") == "72.0\n1"
    assert run("a = 1") == ""
    for code in ("import os", "a = b = 1", "print(1, 2)", "print(1, end='')", "for i in a: pass", "exec('1')", "a ="):
        with pytest.raises(ValueError, match="expected NAME = EXPRESSION|no program"):
            run(code)


@pytest.mark.parametrize(
    ("number", "text"), [(51.0, "51"), (0.5, "0.5"), (10, "10"), (1e-7, "0"), (1234567.25, "1234567.25")]
)
def test_plain_numbers_have_no_exponent(number, text):
    assert plain(number) == text


def test_the_sandbox_prints_the_same():
    from verl_ext.sandbox.client import SandboxClient
    from verl_ext.sandbox.launch import running_server

    codes = ["print(0.1 + 0.2)", "a = 7 / 2\nb = a * 3\nprint(b)", "print(9 // 2)\nprint(1400.0 - 3)", "print(-7 % 4)"]

    async def ask(url):
        client = SandboxClient([url])
        try:
            return await asyncio.gather(*(client.run(code, timeout_s=20) for code in codes))
        finally:
            await client.aclose()

    with running_server(options=("--preload=",)) as url:
        said = [result.stdout.rstrip("\n") for result in asyncio.run(ask(url))]
    assert said == [run(code) for code in codes]
