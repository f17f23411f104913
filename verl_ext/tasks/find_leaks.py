"""Look in a box for what gives the fix of a repository away: `python3 -I /tmp/find_leaks.py`, whose text this file is.

It reads /tmp/leaks.json: `packages`, names by which the repository's code is imported, and `files`, path below a folder
of sys.path -> lines that only the fix has. It prints a JSON list: packages that this Python has, and files outside of
/app that end in such a path and have half of its lines. It uses only the standard library.
"""

import importlib.util
import json
import os

ELSEWHERE = ("/app", "/home", "/tmp", "/tests", "/logs", "/solution", "/proc", "/sys", "/dev")


def main() -> None:
    with open("/tmp/leaks.json") as file:
        wanted = json.load(file)
    found = [f"package {name}" for name in wanted["packages"] if importlib.util.find_spec(name)]
    names = {path.rpartition("/")[2] for path in wanted["files"]}
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in ELSEWHERE]
        for name in names.intersection(files):
            path = os.path.join(folder, name)
            for end, lines in wanted["files"].items():
                if path.endswith(f"/{end}") and 2 * len(lines_of(path).intersection(lines)) >= len(lines):
                    found.append(f"file {path}")
    print(json.dumps(found))


def lines_of(path: str) -> set[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return {line.strip() for line in file}
    except OSError:
        return set()


if __name__ == "__main__":
    main()
