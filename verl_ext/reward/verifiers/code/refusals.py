"""Tests that can judge no program, because of what they do with an object that stays in another process.

An event loop runs no coroutine of another process, although a coroutine of the test can await one; and nothing can be
sent into a generator there. A right program would fail such a test, so its syntax is refused for every program.
"""

import ast

ASYNC_LIBRARIES = {"asyncio", "anyio", "trio", "curio", "uvloop"}
TAKE_COROUTINES = {"run", "create_task", "run_coroutine_threadsafe", "wait", "start_soon"}  # not a mere awaitable
LISTENING = {"send", "throw", "asend", "athrow", "aclose"}
QUESTIONS = {f"is{kind}{suffix}" for kind in ("coroutine", "generator", "asyncgen") for suffix in ("", "function")}
QUESTIONS |= {"isawaitable"}
KINDS = {"GeneratorType", "CoroutineType", "AsyncGeneratorType", "Generator", "AsyncGenerator", "Coroutine"}
KINDS |= {"Awaitable", "AsyncIterator", "AsyncIterable"}
STATES = ("gi_", "cr_", "ag_")  # how the attributes of generators and coroutines begin
ITERATORS = {"iter", "map", "filter", "zip", "enumerate", "reversed"}
CONSUMERS = ITERATORS | {"next", "list", "tuple", "set", "frozenset", "dict", "sorted", "sum", "min", "max", "any"}
CONSUMERS |= {"all", "len", "print", "isinstance", "type"}


def why_refused(tree: ast.Module) -> str:
    """Return why a test can judge no program; "" for one that can."""
    nodes = list(ast.walk(tree))
    if what := _runs(nodes):
        return f"the test runs {what!r} as a coroutine, which stays with the program"
    if name := _asks(nodes):
        return f"the test uses {name!r} to ask for a generator or coroutine, which stays with the program"
    if name := _sends(nodes):
        return f"the test uses {name!r} of a generator, which stays with the program"
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    if any(isinstance(node, ast.Yield) and id(node) not in statements for node in nodes):
        return "the test has a generator that takes what is sent to it"
    if name := _shared_iterator(nodes):
        return f"the test passes the iterator {name!r}, and uses it itself as well"
    return ""


def _runs(nodes: list[ast.AST]) -> str:
    """Return what a test gives from the program to an event loop, or to `async for` and `async with`."""
    own = ASYNC_LIBRARIES | _imported(nodes, ASYNC_LIBRARIES)
    own |= {node.name for node in nodes if isinstance(node, ast.AsyncFunctionDef | ast.ClassDef)}

    def is_own(node: ast.AST) -> bool:
        root = node.func if isinstance(node, ast.Call) else node
        while isinstance(root, ast.Attribute):
            if root.attr in own:
                return True
            root = root.value
        return isinstance(root, ast.Name) and root.id in own

    for node in nodes:  # nearly in the order of the text: variables that hold the test's own objects
        if isinstance(node, ast.Assign) and is_own(node.value):
            own |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name) and is_own(node.context_expr):
            own.add(node.optional_vars.id)
    for node in nodes:
        given: list[ast.AST] = []
        if isinstance(node, ast.AsyncFor) or getattr(node, "is_async", 0):
            given = [node.iter]
        elif isinstance(node, ast.AsyncWith):
            given = [item.context_expr for item in node.items]
        elif isinstance(node, ast.Call) and _last_name(node.func) in {"aiter", "anext"}:
            given = node.args[:1]
        elif isinstance(node, ast.Call) and _last_name(node.func) in TAKE_COROUTINES and _is_of_loop(node.func, own):
            given = [each for each in ast.walk(node.args[0]) if isinstance(each, ast.Call)] if node.args else []
            given = given[:1] or (node.args[:1] if _last_name(node.func) != "wait" else [])
        for each in given:
            if not is_own(each):
                return ast.unparse(each)[:80]
    return ""


def _is_of_loop(function: ast.AST, own: set[str]) -> bool:
    """Return whether a function is `asyncio.run` or `run` of it, or `create_task` and the like of any object."""
    if isinstance(function, ast.Name):
        return function.id in own
    return _last_name(function) not in ("run", "wait") or ast.unparse(function).partition(".")[0] in own


def _asks(nodes: list[ast.AST]) -> str:
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith(STATES):
            return node.attr
        if isinstance(node, ast.Call) and _last_name(node.func) in QUESTIONS:
            return _last_name(node.func)
        if isinstance(node, ast.Call) and _last_name(node.func).lower().endswith(("isinstance", "issubclass")):
            for each in (inner for argument in node.args[1:] for inner in ast.walk(argument)):
                if _last_name(each) in KINDS:
                    return _last_name(each)
    return ""


def _sends(nodes: list[ast.AST]) -> str:
    """Return the attribute by which a test talks to a generator; an instance of a class may have such an attribute."""
    own = _imported(nodes)
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_made_by_class(node.value):
            own |= {ast.unparse(target) for target in getattr(node, "targets", None) or [node.target]}
        elif isinstance(node, ast.NamedExpr) and _is_made_by_class(node.value):
            own.add(node.target.id)
        elif isinstance(node, ast.withitem) and node.optional_vars and _is_made_by_class(node.context_expr):
            own.add(ast.unparse(node.optional_vars))
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in LISTENING:
            if not _is_made_by_class(node.value) and ast.unparse(node.value) not in own:
                return node.attr
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("getattr", "methodcaller", "attrgetter"):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and argument.value in LISTENING:
                    return argument.value
    return ""


def _is_made_by_class(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and _last_name(node.func).lstrip("_")[:1].isupper()


def _shared_iterator(nodes: list[ast.AST]) -> str:
    """Return a variable with an iterator that a function of the program gets and that the test reads again."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    yields = (ast.Yield, ast.YieldFrom)
    generators = {node.name for node in functions if any(isinstance(each, yields) for each in ast.walk(node))}
    held = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _is_iterator(node.value, generators)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    read = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) not in CONSUMERS:
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if isinstance(argument, ast.Name) and argument.id in held and read.count(argument.id) > 1:
                    return argument.id
    return ""


def _is_iterator(node: ast.AST, generators: set[str]) -> bool:
    if isinstance(node, ast.GeneratorExp):
        return True
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return name in ITERATORS | generators or name.startswith("itertools.")


def _imported(nodes: list[ast.AST], libraries: set[str] | None = None) -> set[str]:
    """Return the names that imports bind; only those of `libraries`, if given."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                library = (getattr(node, "module", None) or alias.name).partition(".")[0]
                if libraries is None or library in libraries:
                    names.add(alias.asname or alias.name.partition(".")[0])
    return names


def _last_name(node: ast.AST) -> str:
    """Return `run` for `run` and for `asyncio.run`; "" for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
