"""The environment `math_tools` against a real sandbox, which runs its program with the packages of this Python."""

import io
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_ext.environments import math_program
from verl_ext.environments.math_tools import PROGRAM, MathTools
from verl_ext.protocols.base import Call
from verl_ext.sandbox import running_server


@pytest.fixture(scope="module")
def url():
    with running_server(workers=2) as url:
        yield url


@pytest.fixture
async def tools(url):
    tools = MathTools(with_limits(url))
    yield tools
    await tools.sandbox.aclose()  # the process shares it, but each test has its own event loop


def with_limits(url: str, **limits: float) -> OmegaConf:
    limits = {"urls": [url], "timeout_s": 20, "memory_limit_mb": 1024, "queue_timeout_s": 20} | limits
    return OmegaConf.create({"retool": {"sandbox": limits}})


async def said(tools: MathTools, name: str, **arguments: object) -> str:
    result = await tools.call(Call(name, arguments, 0))
    assert not result.failure and (result.error is not None) == ("Error:" in result.output), result
    return result.output


def answer(name: str, **arguments: object) -> str:
    """What the program says by itself, in this process."""
    return math_program.TOOLS[name](**arguments)


def test_a_model_solves_an_equation_in_the_agent_loop(url, roll_out, qwen_tokenizer, monkeypatch):
    from verl_ext.sandbox import SandboxClient

    monkeypatch.setattr("verl_ext.environments.math_tools.shared_client", lambda _: SandboxClient([url]))
    calls = [
        {"name": "solve", "arguments": {"equations": ["x + y = 3", "x*y = 2"], "unknowns": ["x", "y"]}},
        {"name": "simplify", "arguments": {"expression": "sin(x)**2 +", "form": "simplify"}},
        {"name": "simplify", "arguments": {"expression": "x", "form": "beautify"}},
        {"name": "integrate", "arguments": {"expression": "x", "variable": "x", "lower": 0, "upper": "pi"}},
    ]
    turns = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls] + ["\\boxed{1}"]
    ids = [qwen_tokenizer.encode(turn) + [qwen_tokenizer.eos_token_id] for turn in turns]
    settings = {"protocol": "hermes", "max_tool_calls": 9, "response_length": 3000, "environment": "math_tools"}
    episode, *_ = roll_out(qwen_tokenizer, ids, max_tool_response_tokens=300, **settings)
    told = [turn.reply.text for turn in episode.turns if turn.reply]
    assert "x = 1, y = 2\nx = 2, y = 1" in told[0] and "SyntaxError: invalid syntax" in told[1]
    assert "'form' must be one of ['simplify', 'expand', 'factor', 'apart', 'evaluate']" in told[2]
    assert "pi**2/2 (about 4.9348022)" in told[3]
    assert (episode.use.ok, episode.use.errors, episode.finish_reason) == (2, {"SyntaxError": 1}, "answer")


@pytest.mark.parametrize(
    ("tool", "arguments", "expected"),
    [
        ("solve", {"equations": ["x^2 = 2"], "unknowns": ["x"]}, "x = sqrt(2) (about 1.4142136)"),
        ("solve", {"equations": ["x^2 < 4"], "unknowns": ["x"]}, "(-2 < x) & (x < 2)"),
        ("solve", {"equations": ["x + y = 1"], "unknowns": ["x", "y"]}, "x = 1 - y\nAny y will do."),
        ("solve", {"equations": ["1 = 0"], "unknowns": ["x"]}, "There is no solution."),
        ("solve", {"equations": ["x = x"], "unknowns": ["x"]}, "All values are solutions."),
        ("solve", {"equations": ["E = m c^2"], "unknowns": ["E", "m"]}, "E = c**2*m"),
        ("simplify", {"expression": "2x(x+1)", "form": "expand"}, "2*x**2 + 2*x"),
        ("simplify", {"expression": "x^2 - 1", "form": "factor"}, "(x - 1)*(x + 1)"),
        ("simplify", {"expression": "5!/2 + 1e3", "form": "simplify"}, "1060"),
        ("simplify", {"expression": "e^π", "form": "evaluate"}, "23.140692632779"),
        ("differentiate", {"expression": "x**3", "variable_name": "x", "order": 2}, "6*x"),
        ("integrate", {"expression": "cos(x)", "variable_name": "x"}, "sin(x) + C"),
        ("integrate", {"expression": "exp(-x^2)", "variable_name": "x", "lower": "-oo", "upper": "oo"}, "sqrt(pi)"),
        ("integrate", {"expression": "x^x", "variable_name": "x", "lower": 0, "upper": 1}, "about 0.783430511"),
        ("find_roots", {"expression": "cos(x)=x", "variable_name": "x", "lower": -9, "upper": 9}, "x = 0.739085133"),
        ("find_roots", {"expression": "(x-1)^2 (x+2)", "variable_name": "x", "lower": -9, "upper": 9.3}, "x = -2, 1"),
        ("find_roots", {"expression": "1/x", "variable_name": "x", "lower": -1, "upper": 2}, "No root was found"),
        (
            "optimize",
            {"expression": "x sin(x)", "variables": ["x"], "lower": [0], "upper": ["4*pi"], "goal": "maximum"},
            "The maximum is 7.91672737 at x = 7.97866",
        ),
        (
            "optimize",
            {"expression": "(x-1)^2+y^2", "variables": ["x", "y"], "lower": [0, -5], "upper": [5, 5],
             "goal": "minimum"},
            "The minimum is 0 at x = 1, y = 0.",
        ),
        (
            "optimize",
            {"expression": "1/x", "variables": ["x"], "lower": [-1], "upper": [1], "goal": "maximum"},
            "It seems to have no maximum",
        ),
    ],
)  # fmt: skip
def test_what_the_tools_answer(tool, arguments, expected):
    assert expected in answer(tool, **arguments)


def test_a_plot_says_in_words_what_one_would_see():
    parabola = answer("plot", expressions=["x^2 - 4", "2x + 1"], variable_name="x", lower=-5, upper=5)
    assert parabola.splitlines() == [
        "x**2 - 4 for x from -5 to 5:",
        "- from 21 at x = -5 to 21 at x = 5; the points lie between -4 (at 0) and 21 (at -5)",
        "- zeros: -2, 2",
        "- local maxima: none",
        "- local minima: -4 at x = 0",
        "2*x + 1 for x from -5 to 5:",
        "- from -9 at x = -5 to 11 at x = 5; the points lie between -9 (at -5) and 11 (at 5)",
        "- zeros: -0.5",
        "- local maxima: none",
        "- local minima: none",
        # x**2 - 2 x - 5 = 0 at 1 -+ sqrt(6), and 2 x + 1 there is 3 -+ 2 sqrt(6)
        "x**2 - 4 and 2*x + 1 cross or touch at: (-1.44948974, -1.89897949), (3.44948974, 7.89897949)",
    ]
    torn = answer("plot", expressions=["tan(x)", "floor(x)"], variable_name="x", lower=-3, upper=3)
    assert "- poles at: -1.57079633, 1.57079633" in torn and "221665789" not in torn
    assert "- jumps at: -2 (from -3 to -2), -1 (from -2 to -1), 0 (from -1 to 0)" in torn
    assert "- zeros: 0 to 0.999" in torn
    half = answer("plot", expressions=["sqrt(x)"], variable_name="x", lower=-1, upper=1)
    assert "- no real value at: -1 to -0.0005" in half
    assert "it has no real value there" in answer("plot", expressions=["I*x"], variable_name="x", lower=1, upper=2)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('id')",
        "x.__class__",
        "x.evalf()",
        "x.subs(x, 5)",
        "lambda: 1",
        "[1, 2]",
        "{x}",
        "'text'",
        "x; x",
        "x := 1",
        "open(x)",
        "print(x)",
        "exec(x)",
        "Symbol(x).name",
        "f\"{x}\"",
        "x if x else y",
        "not x",
        "\\frac{1}{2}",
        "x\ny",
        "((((",
        "",
        "1" * 3000,
        "sine(x)",
        "x" + "^x" * 900,
        "(" * 300 + ")" * 300,
        {"expression": 1},
        None,
        True,
        "zoo.args",
        "x@y",
        "sin",
        "(1, 2)",
    ],
)  # fmt: skip
def test_a_text_that_is_no_expression_is_refused_in_one_line(expression, monkeypatch, capsys):
    call = json.dumps({"tool": "simplify", "arguments": {"expression": expression}})
    monkeypatch.setattr("sys.stdin", io.StringIO(call))
    with pytest.raises(SystemExit) as ended:
        math_program.main()
    told = capsys.readouterr()
    assert ended.value.code == 1 and told.out == "" and told.err.count("\n") == 1, told
    assert "Error: " in told.err and len(told.err) < 400


@pytest.mark.parametrize(
    ("said", "raised"),
    [
        ("libblas.so: failed to map segment from shared object", MemoryError),
        ("No module named 'scipy'", SystemExit),
    ],
)
def test_a_library_that_found_no_memory_is_not_taken_for_one_that_is_missing(monkeypatch, said, raised):
    def fail(name):
        raise ImportError(said)

    monkeypatch.setattr(math_program.importlib, "import_module", fail)
    with pytest.raises(raised):
        math_program.scipy("optimize")


def test_powers_are_counted_before_sympy_sees_them():
    assert math_program.parse("x" + "*x^2" * 100, ["x"]).free_symbols
    for power in ("^", "**"):
        with pytest.raises(ValueError, match="at most 100 powers, this one 101"):
            math_program.parse("x" + f"{power}x" * 101, ["x"])


def test_no_name_that_passes_reaches_pythons_own_functions():
    for name in [*dir(__builtins__), *dir(math_program), *dir(math_program.sympy_parser)]:
        for text in (name, f"{name}(x)", f"{name}(1)*x"):
            try:
                parsed = math_program.parse(text, ["x"])
            except Exception:  # refused
                continue
            assert not parsed.atoms(math_program.sympy.core.function.AppliedUndef), text
            known = {str(symbol) for symbol in parsed.free_symbols} | math_program.NAMES.keys()
            assert name in known, f"{text} gave {parsed!r}"


# Whose error it is ---------------------------------------------------------------------------------------------------


async def test_what_a_model_can_cause_is_its_own_error(url):
    limited = MathTools(with_limits(url, timeout_s=1))
    assert await said(limited, "simplify", expression="9^9^9^9", form="evaluate") == "TimeoutError: stopped after 1 s"
    too_large = await said(limited, "simplify", expression="factorial(10^5)")
    assert "Error: " in too_large and "\n" not in too_large
    assert "integrate has no argument 'by'" in await said(limited, "integrate", expression="x", by="x")
    assert "expected an expression as text, got [1]" in await said(limited, "solve", equations=[[1]], unknowns=["x"])
    assert "expected the name of a variable" in await said(limited, "solve", equations=["x"], unknowns=["x.y"])
    assert "characters, this one 1000000" in await said(limited, "simplify", expression="1" * 10**6)
    await limited.sandbox.aclose()


async def test_a_sandbox_that_does_not_answer_is_the_infrastructures_failure():
    tools = MathTools(with_limits("http://127.0.0.1:9", queue_timeout_s=0.5, timeout_s=1))
    result = await tools.call(Call("simplify", {"expression": "x"}, 0))
    assert "sandbox failed" in result.failure and result.error is None and tools.is_stateless
    await tools.sandbox.aclose()


async def test_a_sandbox_without_sympy_is_our_error_by_name(url, monkeypatch):
    monkeypatch.setattr(
        "verl_ext.environments.math_tools.PROGRAM", PROGRAM.replace("import sympy\n", "import sympyy\n")
    )
    tools = MathTools(with_limits(url))
    with pytest.raises(
        RuntimeError, match="No module named 'sympyy'. Install numpy, sympy and scipy beside its server"
    ):
        await tools.call(Call("simplify", {"expression": "x"}, 0))
    await tools.sandbox.aclose()


async def test_episodes_that_are_given_up_leave_no_program_behind(url, tools, give_up):
    calls = [("simplify", {"expression": "9^9^9^9", "form": "evaluate"})]
    assert await give_up("math_tools", with_limits(url, timeout_s=2), calls, count=60) == 0
    assert await said(tools, "simplify", expression="x + x") == "2*x", "a worker is free again"


def test_the_program_imports_nothing_of_the_package():
    assert "verl_ext" not in Path(math_program.__file__).read_text().split('"""', 2)[2]
