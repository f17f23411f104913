"""The environment `math_tools`: algebra by SymPy, roots and optima by SciPy, and plots in words, all in the sandbox.

    retool: {protocol: hermes, environment: [python, math_tools]}

The program that runs there is math_program.py, the same for each call; what the model wrote is its standard input.
"""

import json
from pathlib import Path
from typing import Any

from verl_ext.environments.base import Environment, tool
from verl_ext.environments.interpreter import error_kind
from verl_ext.environments.math_program import MISSING
from verl_ext.environments.shared_client import shared_client
from verl_ext.episode import CallResult
from verl_ext.protocols.base import format_output

PROGRAM = Path(__file__).with_name("math_program.py").read_text(encoding="utf-8")
GRACE_S = 30.0  # beyond the limits of the sandbox's client, which then says what happened


class MathTools(Environment):
    """An episode with tools for mathematics. Limits of time and memory are those of `retool.sandbox`.

    Attributes:
        sandbox: the client that all episodes of the process share.
    """

    is_stateless = True

    def __init__(self, config: Any):
        super().__init__(config)
        self._settings = config.retool.sandbox
        self.sandbox = shared_client(self._settings)
        self.call_s = self._settings.timeout_s + self._settings.queue_timeout_s + GRACE_S

    @tool
    async def solve(self, equations: list[str], unknowns: list[str]) -> CallResult:
        """Solve equations or inequalities exactly, with SymPy.

        Args:
            equations: such as ["x + y = 3", "x*y = 2"]; an expression without a sign is to be 0.
            unknowns: such as ["x", "y"].
        """
        return await self._run("solve", equations=equations, unknowns=unknowns)

    @tool
    async def simplify(self, expression: str, form: str = "simplify") -> CallResult:
        """Bring an expression into another form, with SymPy.

        Args:
            expression: such as "sin(x)**2 + cos(x)**2".
            form: simplify, expand, factor, apart (partial fractions) or evaluate (decimals).
                (choices: ["simplify", "expand", "factor", "apart", "evaluate"])
        """
        return await self._run("simplify", expression=expression, form=form)

    @tool
    async def differentiate(self, expression: str, variable: str, order: int = 1) -> CallResult:
        """Differentiate an expression, with SymPy.

        Args:
            expression: such as "x**2*exp(x)".
            variable: such as "x".
            order: how many times.
        """
        return await self._run("differentiate", expression=expression, variable_name=variable, order=order)

    @tool
    async def integrate(
        self, expression: str, variable: str, lower: str | float = "", upper: str | float = ""
    ) -> CallResult:
        """Integrate an expression, with SymPy; without bounds indefinitely.

        Args:
            expression: such as "x*sin(x)".
            variable: such as "x".
            lower: such as 0 or "-oo".
            upper: such as "pi/2".
        """
        bounds = {name: value for name, value in (("lower", lower), ("upper", upper)) if value != ""}
        return await self._run("integrate", expression=expression, variable_name=variable, **bounds)

    @tool
    async def find_roots(self, expression: str, variable: str, lower: str | float, upper: str | float) -> CallResult:
        """Find numerically all roots of a function of one variable in an interval, with SciPy.

        Args:
            expression: such as "cos(x) - x" or "cos(x) = x".
            variable: such as "x".
            lower: the interval's start.
            upper: the interval's end.
        """
        return await self._run("find_roots", expression=expression, variable_name=variable, lower=lower, upper=upper)

    @tool
    async def optimize(self, expression: str, variables: list[str], lower: list, upper: list, goal: str) -> CallResult:
        """Find numerically the global minimum or maximum within bounds, with SciPy.

        Args:
            expression: such as "(x - 1)**2 + y**2".
            variables: such as ["x", "y"].
            lower: the lower bound of each variable.
            upper: the upper bound of each variable.
            goal: minimum or maximum. (choices: ["minimum", "maximum"])
        """
        given = {"expression": expression, "variables": variables, "lower": lower, "upper": upper}
        return await self._run("optimize", **given, goal=goal)

    @tool
    async def plot(self, expressions: list[str], variable: str, lower: str | float, upper: str | float) -> CallResult:
        """Describe the graphs of up to four functions in words: range, zeros, extrema, jumps, and where they cross.

        Args:
            expressions: such as ["x**2", "2*x + 1"].
            variable: such as "x".
            lower: the axis's start.
            upper: the axis's end.
        """
        return await self._run("plot", expressions=expressions, variable_name=variable, lower=lower, upper=upper)

    async def _run(self, name: str, **arguments: Any) -> CallResult:
        """Run a tool in the sandbox.

        Raises:
            RuntimeError: the sandbox's Python has no SymPy or SciPy.
        """
        limits = {"timeout_s": self._settings.timeout_s, "memory_limit_mb": self._settings.memory_limit_mb}
        result = await self.sandbox.run(PROGRAM, stdin=json.dumps({"tool": name, "arguments": arguments}), **limits)
        if result.status == "sandbox_failure":
            return CallResult("", failure=result.message, attempts=result.attempts)
        if result.return_code == MISSING:
            raise RuntimeError(
                f"The sandbox cannot run math_tools: {result.stderr.strip()}. Install numpy, sympy and scipy beside "
                "its server, or raise retool.sandbox.memory_limit_mb if memory ran out."
            )
        said = format_output(result.stdout, result.error_text(limits["timeout_s"]), traceback="last_line")
        kind = None if result.status == "ok" else error_kind(result)
        return CallResult(said, kind, queue_s=result.queue_s, run_s=result.run_s, attempts=result.attempts)
