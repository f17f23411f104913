"""The table of what this package replaces: its hashes are of the installed source, and no patch lacks a row."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl_ext.cpu.patches import VERSIONS
from verl_ext.patches import TABLE, Patch, differences, find, hash_of, main
from verl_ext.versions import require_versions

ROOT = Path(__file__).parents[2]
LOSSES = "verl.workers.utils.losses"
ROWS = {"ours.py": [Patch("replaced", f"{LOSSES}.ppo_loss", "for a test", hash_of(f"{LOSSES}.ppo_loss"))]}

# Hashes --------------------------------------------------------------------------------------------------------------


def test_every_row_has_the_hash_of_the_installed_source():
    lines = [*differences()]
    try:
        require_versions(VERSIONS, "this test")
    except RuntimeError:  # a machine with GPUs has other versions of all but verl
        lines = [line for line in lines if line.startswith("verl.")]
    assert lines == []


def test_of_pythons_own_only_the_name_is_compared():
    rows = [Patch("replaced", f"importlib.metadata.{name}", "for a test", "any") for name in ("version", "vershion")]
    [line] = differences({"ours.py": rows})
    assert line.startswith("importlib.metadata.vershion is gone: check ours.py")


@pytest.fixture
def edit(tmp_path):
    """Return a function that copies verl's file of losses to `tmp_path` with one text replaced."""

    def edit(old, new):
        parts = Path("workers/utils/losses.py")
        text = Path(find_spec("verl").submodule_search_locations[0], parts).read_text()
        assert old in text
        copy = tmp_path / "verl" / parts
        copy.parent.mkdir(parents=True)
        copy.write_text(text.replace(old, new, 1))

    return edit


def test_a_changed_function_is_reported_by_name(edit, tmp_path):
    edit('model_output.get("entropy", None)', 'model_output["entropy"]')
    (line,) = differences(ROWS, tmp_path)
    assert line.startswith(f"{LOSSES}.ppo_loss differs (hash ")
    assert line.endswith("): check ours.py (replaced: for a test), then correct the row.")


def test_a_renamed_function_is_reported_by_name(edit, tmp_path):
    edit("def ppo_loss(", "def policy_loss(")
    (line,) = differences(ROWS, tmp_path)
    assert line.startswith(f"{LOSSES}.ppo_loss is gone: check ours.py")


def test_comments_docstrings_and_formatting_do_not_count(edit, tmp_path):
    edit('    """Computes ppo loss from model output', '    """Compute the loss.')
    assert [*differences(ROWS, tmp_path)] == []
    edited = tmp_path / "verl/workers/utils/losses.py"
    moved = tmp_path / "moved/verl/workers/utils/losses.py"
    moved.parent.mkdir(parents=True)
    moved.write_text("# moved by a line\n" + edited.read_text().replace("    entropy = ", "    entropy =  ", 1))
    assert [*differences(ROWS, tmp_path / "moved")] == []


def test_a_missing_file_is_reported_by_name(edit, tmp_path, capsys):
    edit("def ppo_loss(", "def ppo_loss(")
    assert main(["--check", "--packages", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "verl.utils.tracking.Tracking.log is gone: check verl_ext/trainer/tracking.py" in "\n".join(lines)
    assert not any(line.startswith(LOSSES) or line.startswith("transformers") for line in lines)


def test_an_imported_name_has_the_hash_of_its_definition():
    assert hash_of("verl.trainer.ppo.v1.trainer_base.reduce_metrics") == hash_of(
        "verl.utils.metric.utils.reduce_metrics"
    )


def test_an_attribute_that_a_class_sets_on_self_has_a_hash():
    buffer = "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer"
    assert hash_of(f"{buffer}.partitions") and not hash_of(f"{buffer}.no_such_attribute")


def test_the_table_and_a_hash_are_printed_without_an_import_of_the_libraries():
    def run(*args: str) -> list[str]:
        code = "import sys; from verl_ext.patches import main; rc = main(sys.argv[1:]); "
        code += "assert not {'verl', 'torch', 'vllm', 'transformers'} & {*sys.modules}; sys.exit(rc)"
        ran = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, check=True, capture_output=True, text=True)
        return ran.stdout.splitlines()

    assert len(run()) == sum(map(len, TABLE.values()))
    assert run("--hash", f"{LOSSES}.ppo_loss") == [hash_of(f"{LOSSES}.ppo_loss")]


# No patch without a row ----------------------------------------------------------------------------------------------


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Return our files, by their names in the table."""
    files = sorted((ROOT / "verl_ext").rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in files}


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def file_of(module: str) -> str:
    path = module.replace(".", "/")
    return f"{path}.py" if f"{path}.py" in sources() else f"{path}/__init__.py"


def calls_of(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return (call for call in calls if ast.unparse(call.func).rpartition(".")[2] == name)


def require_rows(missing: list[str]) -> None:
    assert not missing, "\n".join(["Add rows to TABLE in verl_ext/patches.py:", *missing])


def hooks() -> Iterator[tuple[str, str, str]]:
    """Yield (file that registers, file that patches, module that is patched) of every hook."""
    for file, tree in sources().items():
        constants = {
            node.targets[0].id: node.value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for call in calls_of(tree, "register_post_import_hook"):
            hook, module = call.args
            if isinstance(hook, ast.Constant):
                patcher = file_of(hook.value.partition(":")[0])
            else:  # a function of this file, or imported from another one
                patcher = file_of(find(f"{module_of(file)}.{hook.id}")[0].rpartition(".")[0])
            yield file, patcher, eval(ast.unparse(module), {}, constants)


def test_every_import_hook_has_a_row():
    found = [*hooks()]
    assert {file for file, _, _ in found} == {
        "verl_ext/__init__.py",
        "verl_ext/checkpoints/hooks.py",
        "verl_ext/cpu/patches.py",
    }
    require_rows(
        [
            f"under {patcher!r}, what of {module} it replaces (python -m verl_ext.patches --hash {module}.NAME)"
            for _, patcher, module in found
            if not any(row.symbol.startswith(f"{module}.") for row in TABLE.get(patcher, ()))
        ]
    )


def test_every_file_that_requires_versions_has_a_row():
    calls = {(file, call) for file, tree in sources().items() for call in calls_of(tree, "require_versions")}
    named = {file for file, _ in calls} | {ast.literal_eval(call.args[1]) for _, call in calls}
    require_rows([f"under {file!r}, what it replaces" for file in sorted(named - TABLE.keys())])


def ancestors(symbol: str) -> list[tuple[str, ast.ClassDef]]:
    """Return the classes that a class inherits from, with their paths, in about the order of a method's look-up."""
    path, nodes = find(symbol)
    bases = [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    found: list[tuple[str, ast.ClassDef]] = []
    for base in bases:
        names = ast.unparse(base).split(".")
        while names:  # `AgentLoopWorkerTQ.__ray_metadata__.modified_class` is AgentLoopWorkerTQ
            path_of_base, nodes = find(".".join([path.rpartition(".")[0], *names]))
            if nodes and isinstance(nodes[0], ast.ClassDef):
                found += [(path_of_base, nodes[0]), *ancestors(path_of_base)]
                break
            names.pop()
    return found


def methods_of(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def overrides() -> Iterator[tuple[str, str]]:
    """Yield (file, symbol) of private methods of other packages' classes that our classes override."""
    for file, tree in sources().items():
        for node in tree.body:
            if not isinstance(node, ast.ClassDef):
                continue
            above = ancestors(f"{module_of(file)}.{node.name}")
            private = {name for name in methods_of(node) if name.startswith("_") and not name.startswith("__")}
            for name in sorted(private):
                theirs = [path for path, each in above if name in methods_of(each) and not path.startswith("verl_ext.")]
                if theirs:
                    yield file, f"{theirs[0]}.{name}"


def test_every_override_of_a_private_method_has_a_row():
    found = [*overrides()]
    trainer = "verl.trainer.ppo.v1.trainer_base.PPOTrainer"
    assert ("verl_ext/trainer/run_validation.py", f"{trainer}._validate") in found
    buffer = "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer"
    assert ("verl_ext/trainer/repeatable.py", f"{buffer}._select_prompt_uids") in found  # of a mix-in
    require_rows(
        [
            f"under {file!r}: overridden({symbol!r}, 'why', {hash_of(symbol)!r})"
            for file, symbol in found
            if not any(row.symbol.endswith(symbol) and row.kind == "overridden" for row in TABLE.get(file, ()))
        ]
    )


def test_every_row_of_an_override_has_its_method():
    assert TABLE.keys() <= sources().keys()
    rows = [(file, row.symbol) for file, rows in TABLE.items() for row in rows if row.kind == "overridden"]
    methods = {
        file: set().union(*(methods_of(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)))
        for file, tree in sources().items()
    }
    left = [f"{symbol} in {file}" for file, symbol in rows if symbol.rpartition(".")[2] not in methods[file]]
    assert not left, f"Remove from TABLE in verl_ext/patches.py what is no longer overridden: {', '.join(left)}"
