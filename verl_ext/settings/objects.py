"""Load what a YAML names: `FILE.py:NAME`, or `package.module:NAME`."""

import importlib
import importlib.util
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any


def load_object(where: str) -> Any:
    """Return the object. A file is executed once in a process, whoever names it.

    Args:
        where: the file is relative to the current folder, and need not be on PYTHONPATH. It can import what stands
            beside it, after all that is installed.
    Raises:
        ImportError, OSError, AttributeError, ValueError: there is none; or whatever else the file raises.
    """
    path, _, name = where.rpartition(":")
    if not path or not name:
        raise ValueError(f"expected FILE.py:NAME or package.module:NAME, got {where!r}")
    return getattr(_file(Path(path)) if path.endswith(".py") else importlib.import_module(path), name)


def _file(path: Path) -> Any:
    path = path.expanduser().resolve(strict=True)
    name = f"{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader, f"{path} does not end in .py"
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
