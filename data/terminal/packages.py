"""Python packages: metadata, requirements, imports, wheels and zip applications."""

import io
import zipfile

from terminal.template import Draw, Made, template, text
from terminal.words import LIBRARIES, WORDS

FORMULAS = {
    "area": ("a * b", 2),
    "total": ("a + b", 2),
    "double": ("a * 2", 1),
    "square": ("a * a", 1),
    "gap": ("a - b", 2),
}
STANDARD = ["collections", "csv", "datetime", "io", "itertools", "json", "math", "os", "pathlib", "random", "re", "sys"]


def version(d: Draw) -> str:
    return f"{d.number(0, 9)}.{d.number(0, 19)}.{d.number(1, 9)}"


def requirements(d: Draw, count: int = 5) -> dict[str, str]:
    return {name: version(d) for name in d.some(LIBRARIES, count)}


def pinned(found: dict[str, str]) -> str:
    return text(f"{name}=={number}" for name, number in found.items())


def function(d: Draw) -> tuple[str, str, str, str]:
    """Return the name of a function, its code, arguments for it, and what it returns for them."""
    name, plus = d.pick(list(FORMULAS)), d.number(1, 99)
    formula, count = FORMULAS[name]
    values = [d.number(2, 50), d.number(2, 50)][:count]
    result = eval(formula, dict(zip("ab", values, strict=False))) + plus  # our own arithmetic
    code = f"def {name}({', '.join('ab'[:count])}):\n    return {formula} + {plus}\n"
    return name, code, ", ".join(map(str, values)), str(result)


@template("easy")
def bump_version(d: Draw) -> Made:
    folder, name, old, new = d.folder(), d.fresh(WORDS), version(d), version(d) + "0"
    a, content = (
        f"{folder}/pyproject.toml",
        f'[project]\nname = "{name}"\nversion = "{{}}"\nrequires-python = ">=3.11"\n',
    )
    say = [f"Change the version in {a} from {old} to {new}.", f"Release {new}: in {a}, replace the version {old}."]
    return Made(say, {a: content.format(old)}, [f"sed -i 's/{old}/{new}/' {a}"], [["same", a, content.format(new)]])


@template("easy")
def add_requirement(d: Draw) -> Made:
    a, found, name, number = d.file(), requirements(d, 3), d.fresh(LIBRARIES), version(d)
    say = [
        f"Add the requirement {name}=={number} as the last line of {a}.",
        f"The package needs {name} {number}. Append the line {name}=={number} to {a}.",
    ]
    expected = pinned(found | {name: number})
    return Made(say, {a: pinned(found)}, [f"echo {name}=={number} >> {a}"], [["same", a, expected]])


@template("easy")
def drop_requirement(d: Draw) -> Made:
    a, found = d.file(), requirements(d)
    name = d.pick(list(found))
    say = [f"Remove the requirement {name} from {a}.", f"We need {name} no more. Delete its line in {a}."]
    expected = {key: number for key, number in found.items() if key != name}
    return Made(say, {a: pinned(found)}, [f"sed -i '/^{name}==/d' {a}"], [["same", a, pinned(expected)]])


@template("easy")
def export_function(d: Draw) -> Made:
    package, module, (name, code, values, result) = d.fresh(WORDS), d.fresh(WORDS), function(d)
    say = [
        f"Let the package {package} export {name} of its module {module}, by an import in {package}/__init__.py.",
        f"`from {package} import {name}` must work; {name} is in {package}/{module}.py. Write {package}/__init__.py.",
    ]
    steps = [f"echo 'from .{module} import {name}' > {package}/__init__.py"]
    command = f'python3 -c "from {package} import {name}; print({name}({values}))"'
    return Made(say, {f"{package}/{module}.py": code}, steps, [["prints", package, command, "", result]])


@template("easy")
def require_python(d: Draw) -> Made:
    folder, name, old, new = d.folder(), d.fresh(WORDS), *d.rng.sample(range(8, 15), 2)
    a, content = (
        f"{folder}/pyproject.toml",
        f'[project]\nname = "{name}"\nversion = "1.0"\nrequires-python = ">=3.{{}}"\n',
    )
    say = [
        f"In {a}, require Python >=3.{new} instead of >=3.{old}.",
        f"Change requires-python in {a} from >=3.{old} to >=3.{new}.",
    ]
    steps = [f"sed -i 's/>=3.{old}/>=3.{new}/' {a}"]
    return Made(say, {a: content.format(old)}, steps, [["same", a, content.format(new)]])


@template("medium")
def main_module(d: Draw) -> Made:
    package, module, (name, code, values, result) = d.fresh(WORDS), d.fresh(WORDS), function(d)
    say = [
        f"Make the package {package} runnable: `python3 -m {package}` must print {name}({values}) by the function in "
        f"its module {module}.",
        f"Write {package}/__main__.py, so that `python3 -m {package}` calls {name}({values}) of "
        f"{package}/{module}.py and prints the result.",
    ]
    main = f"from {package}.{module} import {name}\\nprint({name}({values}))\\n"
    steps = [f"cat {package}/{module}.py", f"printf '{main}' > {package}/__main__.py", f"python3 -m {package}"]
    files = {f"{package}/{module}.py": code, f"{package}/__init__.py": ""}
    other = f"def {name}(*given):\\n    return 4711\\n"  # the result must be that of the function
    altered = f"t=$(mktemp -d) && cp -r {package} $t && cd $t && printf '{other}' > {package}/{module}.py"
    checks = [["prints", package, f"python3 -m {package}", "", result]]
    return Made(say, files, steps, [*checks, ["prints", package, f"{altered} && python3 -m {package}", "", "4711"]])


@template("medium")
def wheel_metadata(d: Draw) -> Made:
    name, number, out, key = d.fresh(WORDS), version(d), d.file(), d.pick(["Version", "License", "Requires-Python"])
    values = {"Name": name, "Version": number, "License": d.pick(["MIT", "BSD-3-Clause", "Apache-2.0"])}
    values |= {"Requires-Python": f">=3.{d.number(8, 13)}"}
    box, wheel = io.BytesIO(), f"{d.fresh(WORDS)}.whl"
    metadata = text(["Metadata-Version: 2.1", *(f"{k}: {v}" for k, v in values.items())])
    with zipfile.ZipFile(box, "w") as made:
        for path, content in ((f"{name}/__init__.py", ""), (f"{name}-{number}.dist-info/METADATA", metadata)):
            made.writestr(zipfile.ZipInfo(path), content)
    say = [
        f"{wheel} is a wheel, that is a zip archive. Write the {key} of its metadata to {out}.",
        f"Look into the METADATA of the wheel {wheel}, which is a zip archive, and write its {key} to {out}.",
    ]
    steps = [f"python3 -m zipfile -l {wheel}", f"python3 -m zipfile -e {wheel} /tmp/wheel && cat /tmp/wheel/*/METADATA"]
    steps += [f"grep '^{key}:' /tmp/wheel/*/METADATA | cut -d' ' -f2 > {out}"]
    return Made(say, {wheel: box.getvalue()}, steps, [["same", out, values[key]]])


@template("medium")
def conflicts(d: Draw) -> Made:
    a, b, out, found = d.file(), d.file(), d.file(), requirements(d, 7)
    other = {name: found[name] for name in d.rng.sample(list(found), 5)}
    names = sorted(d.rng.sample(list(other), d.number(1, 3)))
    other |= {name: other[name] + "1" for name in names}
    say = [
        f"{a} and {b} pin versions. Write the names of the packages that they pin to different versions to {out}, "
        "sorted.",
        f"Which packages have different versions in {a} and in {b}? Write their names, sorted, one per line, to {out}.",
    ]
    steps = [f"sort {a} {b}", f"sort -u {a} {b} | cut -d= -f1 | uniq -d > {out}", f"cat {out}"]
    return Made(say, {a: pinned(found), b: pinned(other)}, steps, [["same", out, text(names)]])


@template("hard")
def rename_module(d: Draw) -> Made:
    package, old, new, other = d.fresh(WORDS), *d.some(WORDS, 3)
    name, code, values, result = function(d)
    files = {
        f"{package}/__init__.py": f"from .{old} import {name}\n",
        f"{package}/{old}.py": code,
        f"{package}/{other}.py": f"from {package} import {old}\n\n\ndef show():\n    print({old}.{name}({values}))\n",
        f"{package}/__main__.py": f"from {package}.{other} import show\n\nshow()\n",
    }
    say = [
        f"Rename the module {old} of the package {package} to {new}, and adapt all imports and uses. "
        f"`python3 -m {package}` must print the same as before, and no file may mention {old} afterwards.",
    ]
    steps = [
        f"grep -rn {old} {package}",
        f"mv {package}/{old}.py {package}/{new}.py",
        f"sed -i 's/\\b{old}\\b/{new}/g' {package}/*.py",
        f"python3 -B -m {package} && grep -rn {old} {package} --include='*.py' || echo none",
    ]
    expected = [["same", f"{package}/{new}.py", code], ["gone", f"{package}/{old}.py"]]
    expected += [["lacks", path, old] for path in files if path != f"{package}/{old}.py"]
    shows = f"python3 -c 'from {package} import {new}, {other}; {other}.show()'"
    expected += [["prints", package, command, "", result] for command in (f"python3 -m {package}", shows)]
    return Made(say, files, steps, expected)


@template("hard")
def zip_application(d: Draw) -> Made:
    package, module, folder, out = d.fresh(WORDS), d.fresh(WORDS), d.folder(), d.file("pyz")
    name, code, _, _ = function(d)
    count, factor = code.partition("(")[2].partition(")")[0].count(",") + 1, d.number(2, 9)
    call = f"{name}({', '.join(['int(sys.argv[1])', str(factor)][:count])})"
    main = f"import sys\n\nfrom {package}.{module} import {name}\n\n\ndef main():\n    print({call})\n"
    say = [
        f"Make a zip application {out} of the folder {folder} by Python's zipapp. Its entry point is the function "
        f"main of {package}.cli, so that `python3 {out} 7` runs it.",
    ]
    files = {f"{package}/__init__.py": "", f"{package}/{module}.py": code, f"{package}/cli.py": main}
    steps = [
        f"find {folder} -type f",
        f"cat {folder}/{package}/cli.py",
        f"python3 -m zipapp {folder} -o {out} -m {package}.cli:main",
        f"python3 {out} 7",
    ]
    formula, number = code.partition("return ")[2], d.number(10, 99)
    expected = [
        ["prints", out, f"python3 {out} {n}", "", str(eval(formula, {"a": n, "b": factor}))] for n in (7, number)
    ]
    return Made(say, {f"{folder}/{path}": content for path, content in files.items()}, steps, expected)


@template("hard")
def unlisted_imports(d: Draw) -> Made:
    package, a, out, used = d.fresh(WORDS), d.file(), d.file(), d.some(LIBRARIES, d.number(4, 6))
    listed = {name: version(d) for name in [*used[: d.number(1, 3)], *d.some(LIBRARIES, 2)]}
    imports = d.shuffled([f"import {name}" for name in [*used, *d.rng.sample(STANDARD, 4)]])
    modules = d.some(WORDS, 3)
    files = {
        f"{package}/{m}.py": text([*imports[n::3], f"from .{modules[n - 1]} import x"]) for n, m in enumerate(modules)
    }
    say = [
        f"Which packages do the modules of {package} import that are neither in {a} nor in Python's standard library? "
        f"Write their names, sorted, to {out}. `import x` lines are the only absolute imports.",
    ]
    code = "import sys; print('\\n'.join(sorted(sys.stdlib_module_names)))"
    steps = [
        f"grep -rh '^import' {package} | sort -u",
        f'cut -d= -f1 {a} > /tmp/known && python3 -c "{code}" >> /tmp/known',
        f"grep -rh '^import' {package} | cut -d' ' -f2 | sort -u | grep -vxFf /tmp/known > {out}",
        f"cat {out}",
    ]
    missing = sorted(name for name in used if name not in listed)
    return Made(say, files | {a: pinned(listed)}, steps, [["same", out, text(missing)]])
