"""What pyproject.toml cannot say: a wheel also brings what commands read at the repository's root."""

import shutil
from fnmatch import fnmatch
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = ("configs/**/*", "data/**/*", "docs/guides/diagnose.md", "recipe/**/*", "requirements/*")
WRITTEN = ("__pycache__", "*.parquet", "*.pass_rates.jsonl", "*.samples")  # there by commands: not shipped


class BuildWithShipped(build_py):
    """Copy these files to verl_ext/shipped, where verl_ext/settings/__init__.py looks for them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # they stay where they are
            return
        target = Path(self.build_lib, "verl_ext", "shipped")
        shutil.rmtree(target, ignore_errors=True)
        for path in sorted(path for pattern in SHIPPED for path in ROOT.glob(pattern) if path.is_file()):
            if not any(fnmatch(part, name) for part in path.relative_to(ROOT).parts for name in WRITTEN):
                file = target / path.relative_to(ROOT)
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, file)


setup(cmdclass={"build_py": BuildWithShipped})
