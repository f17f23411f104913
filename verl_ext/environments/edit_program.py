# The program of the tool `edit` (terminal.py), which runs in the box of an episode. It has no single quotes and imports
# little, because each call starts a Python. Its standard input is JSON: path, old, new.
import json
import os
import sys


def refuse(why):
    print(why)
    sys.exit(3)


said = json.load(sys.stdin)
path, old, new = said["path"], said["old"], said["new"]
try:
    if old:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
        if (count := text.count(old)) != 1:
            refuse(f"`old` occurs {count} times in {path}; it must occur exactly once")
        new = text.replace(old, new)
    elif folder := os.path.dirname(path):
        os.makedirs(folder, exist_ok=True)
    data = new.encode()
    with open(path, "wb") as file:
        file.write(data)
except UnicodeError:
    refuse(f"{path} or its new text is not in UTF-8")
except (OSError, ValueError) as error:
    why = getattr(error, "strerror", None) or error
    refuse(f"{path}: {why}")
print(f"replaced it in {path}" if old else f"wrote {path}")
