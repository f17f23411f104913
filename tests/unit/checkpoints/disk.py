"""A disk that loses power: records what code does to a folder, and replays what a disk may hold afterwards.

Recorded are `os`'s calls on names (mkdir, rename, unlink, rmdir), `fsync`, and, before each of them, every file that is
new or has other bytes than at the last look, whoever wrote it (including torch in C++).

The model of the disk is POSIX's, weaker than any journal:
- a file's bytes are safe once the file is fsynced; until then the old bytes, none, half of them or zeros may be found;
- a change of names is safe once every folder it touches is fsynced; until then it may be there or not, whichever of the
  others are.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Call = tuple[str, tuple]  # ("write", (file, bytes)), ("sync", (node,)), ("rename", (folder, name, folder, name)), ...
Tree = dict[str, bytes | None]  # path -> bytes of a file, None: a folder
ROOT = 0


@dataclass
class Recording:
    """The calls below a folder, from `start` on. Nodes are numbered: a file keeps its number when it is renamed."""

    root: Path
    calls: list[Call] = field(default_factory=list)
    nodes: dict[str, int] = field(default_factory=lambda: {".": ROOT})  # path -> number
    _bytes: dict[int, bytes] = field(default_factory=dict)
    _count: int = 0

    def start(self, patch: pytest.MonkeyPatch) -> None:
        real = {
            name: getattr(os, name) for name in ("fsync", "mkdir", "rename", "replace", "unlink", "remove", "rmdir")
        }

        def fsync(handle: int) -> None:
            if (path := self._inside(os.readlink(f"/proc/self/fd/{handle}"))) is not None:
                self._look()
                self.calls.append(("sync", (self.nodes[path],)))  # the machine is not made to wait for its own disk

        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            self._look()
            real["mkdir"](path, mode, dir_fd=dir_fd)
            if (inside := self._inside(path, dir_fd)) is not None:
                self.nodes[inside] = self._new()
                self.calls.append(("mkdir", (*self._place(inside), self.nodes[inside])))

        def rename(source: Any, target: Any, **_: Any) -> None:
            self._look()
            real["rename"](source, target)
            old, new = self._inside(source), self._inside(target)
            if old is None:
                return
            self.calls.append(("rename", (*self._place(old), *self._place(new))))
            moved = {path: node for path, node in self.nodes.items() if path == old or path.startswith(f"{old}/")}
            self.nodes = {path: node for path, node in self.nodes.items() if path not in moved} | {
                new + path[len(old) :]: node for path, node in moved.items()
            }

        def remover(name: str) -> Any:
            def remove(path: Any, *, dir_fd: int | None = None) -> None:
                self._look()
                real[name](path, dir_fd=dir_fd)
                if (inside := self._inside(path, dir_fd)) is not None:
                    self.calls.append(("remove", self._place(inside)))
                    del self.nodes[inside]

            return remove

        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "mkdir", mkdir)
        for name in ("rename", "replace"):
            patch.setattr(os, name, rename)
        for name in ("unlink", "remove", "rmdir"):
            patch.setattr(os, name, remover(name))

    def mark(self, what: Any) -> None:
        """Note that something is promised from here on, such as a save that returned."""
        self._look()
        self.calls.append(("mark", (what,)))

    def _look(self) -> None:
        for path in sorted(path for path in self.root.rglob("*") if path.is_file()):
            inside, found = str(path.relative_to(self.root)), path.read_bytes()
            if inside not in self.nodes:
                self.nodes[inside] = self._new()
                self.calls.append(("create", (*self._place(inside), self.nodes[inside])))
            node = self.nodes[inside]
            if self._bytes.get(node, b"") != found:
                self._bytes[node] = found
                self.calls.append(("write", (node, found)))

    def _inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        base = Path(os.readlink(f"/proc/self/fd/{dir_fd}")) if dir_fd is not None else Path.cwd()
        full = base / path
        return str(full.relative_to(self.root)) if full.is_relative_to(self.root) else None

    def _place(self, inside: str) -> tuple[int, str]:
        return self.nodes[str(Path(inside).parent)], Path(inside).name

    def _new(self) -> int:
        self._count += 1
        return self._count


def states(calls: list[Call]) -> Iterator[tuple[list[Any], Tree]]:
    """Return what may be on disk after a power loss or kill at any moment: (what was promised by then, the tree)."""
    chance, seen = random.Random(0), set()
    for end in range(len(calls) + 1):
        past = calls[:end]
        promised = [arguments[0] for kind, arguments in past if kind == "mark"]
        for tree in _states_after(past, chance):
            key = len(promised), tuple(sorted(tree.items(), key=lambda item: item[0]))
            if key not in seen:
                seen.add(key)
                yield promised, tree


def lay_out(tree: Tree, folder: Path) -> None:
    folder.mkdir(parents=True)
    for path, content in sorted(tree.items(), key=lambda item: item[0].count("/")):
        (folder / path).mkdir() if content is None else (folder / path).write_bytes(content)


def _states_after(past: list[Call], chance: random.Random) -> Iterator[Tree]:
    last_sync = {arguments[0]: index for index, (kind, arguments) in enumerate(past) if kind == "sync"}
    names = [index for index, (kind, _) in enumerate(past) if kind in ("create", "mkdir", "rename", "remove")]
    open_ = [i for i in names if any(last_sync.get(folder, -1) < i for folder in _folders(past[i]))]
    now: dict[int, bytes] = {}
    safe: dict[int, bytes] = {}
    for kind, arguments in past:
        if kind == "write":
            now[arguments[0]] = arguments[1]
        elif kind == "sync" and arguments[0] in now:
            safe[arguments[0]] = now[arguments[0]]
    unsafe = [node for node in now if now[node] != safe.get(node)]

    kept = [open_[:n] for n in range(len(open_) + 1)]  # a prefix arrived, ..., all
    kept += [[i for i in open_ if i != lost] for lost in open_] + [[only] for only in open_]
    kept += [[i for i in open_ if chance.random() < 0.5] for _ in range(4 if len(open_) > 1 else 0)]
    fates = ["now"] if not unsafe else ["now", "old", "half", "zeros", "mixed"]
    for arrived in kept:
        lost = set(open_) - set(arrived)
        linked = _linked([past[i] for i in names if i not in lost], lenient=bool(lost))
        if linked is None:
            continue
        for fate in fates:
            content = now | {node: _after(fate, now[node], safe.get(node, b""), chance) for node in unsafe}
            yield {path: None if is_folder else content.get(node, b"") for path, (node, is_folder) in linked.items()}


def _after(fate: str, now: bytes, safe: bytes, chance: random.Random) -> bytes:
    if fate == "mixed":
        fate = chance.choice(["now", "old", "half", "zeros"])
    kept = len(safe) if now.startswith(safe) else 0  # what was only added to keeps its beginning
    half = kept + (len(now) - kept) // 2
    return {"now": now, "old": safe, "half": now[:half], "zeros": now[:kept] + bytes(len(now) - kept)}[fate]


def _folders(call: Call) -> tuple[int, ...]:
    kind, arguments = call
    return (arguments[0], arguments[2]) if kind == "rename" else (arguments[0],)


def _linked(changes: list[Call], lenient: bool) -> dict[str, tuple[int, bool]] | None:
    """Return the names that the changes make: path -> (node, is it a folder).

    None: one cannot be without another that was lost, a rename to a name that is taken; such a disk does not exist.
    """
    folders: dict[int, dict[str, int]] = {ROOT: {}}
    for kind, arguments in changes:
        parent, name = arguments[:2]
        there = folders.setdefault(parent, {})
        if kind == "create":
            there[name] = arguments[2]
        elif kind == "mkdir":
            there[name] = arguments[2]
            folders.setdefault(arguments[2], {})
        elif name not in there:
            assert lenient, f"{name} is not there"
        elif kind == "remove":
            if folders.get(there[name]):
                return None  # a folder that is not empty
            del there[name]
        else:
            target, new = folders.setdefault(arguments[2], {}), arguments[3]
            if folders.get(target.get(new, -1)):
                return None
            target[new] = there.pop(name)

    def walk(node: int, at: str) -> Iterator[tuple[str, tuple[int, bool]]]:
        for name, child in folders[node].items():
            yield f"{at}{name}", (child, child in folders)
            if child in folders:
                yield from walk(child, f"{at}{name}/")

    return dict(walk(ROOT, ""))
