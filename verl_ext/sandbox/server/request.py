"""What a request to run code may contain; the models of pydantic refuse anything else."""

import binascii
import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, FailFast, Field, PlainValidator

from verl_ext.sandbox.limits import MAX_TIMEOUT_S
from verl_ext.sandbox.server.archive import MAX_PATH_BYTES, is_inside
from verl_ext.sandbox.server.box_isolation import FOLDERS
from verl_ext.sandbox.server.disk import MAX_DEPTH
from verl_ext.sandbox.server.folders import MAX_FETCH_BYTES, SCRIPT, STDIN
from verl_ext.sandbox.server.namespaces import HOME_INODES

MAX_NAME_BYTES = 255  # NAME_MAX of Linux
MAX_INPUT_INODES = HOME_INODES // 2  # files and folders that `files` makes; the program may make as many more
MAX_RENEWED = 8192  # ids of sessions in one request
MAX_FETCHED = 200  # names in `fetch_files`: the worker has all the files open at once (worker.MAX_OPEN_FILES)


def _text(value: Any) -> str:
    """Accept any str, even with lone surrogates, which JSON can carry: it runs as a file with those bytes would."""
    if not isinstance(value, str):
        raise ValueError("Input should be a valid string")
    return value


def _path_inside(path: str) -> str:
    """Accept a relative path that stays below the request's folder, and that a file there can have."""
    try:
        length = len(os.fsencode(path))
        parts = path[: MAX_PATH_BYTES + 1].split("/")
        longest = max(len(os.fsencode(part)) for part in parts)
    except UnicodeEncodeError:
        raise ValueError("expected a path without lone surrogates") from None
    if not _spelled(parts) or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError("expected a relative path below the request's folder, without '..' or NUL")
    if longest > MAX_NAME_BYTES or length > MAX_PATH_BYTES:
        raise ValueError(
            f"expected names of at most {MAX_NAME_BYTES} bytes and a path of at most {MAX_PATH_BYTES} bytes, "
            f"got a name of {longest} in a path of {length}"
        )
    if len(parts) > MAX_DEPTH:
        raise ValueError(f"expected at most {MAX_DEPTH} names in a path, got {len(parts)}")
    return path


def _spelled(parts: list[str]) -> str:
    """Return a path's normal form. PurePosixPath is too slow: its `parents` take time quadratic in their number."""
    return "/".join(part for part in parts if part not in ("", "."))


def _can_be_made_together(files: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """Normalize the paths; refuse one that is another's folder, is the program's name, or occurs twice."""
    named = {_spelled(path.split("/")): content for path, content in files.items()}
    if len(named) < len(files):
        raise ValueError("two of the paths are the same file")
    folders: set[str] = set()
    for path in named:
        first, _, _ = path.partition("/")
        if first in (SCRIPT, STDIN):
            raise ValueError(f"{first!r} belongs to the sandbox: choose a name other than {path!r}")
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            if len(named) + len(folders) > MAX_INPUT_INODES:
                raise ValueError(f"expected at most {MAX_INPUT_INODES} files and folders, got more")
            folder = folder.rpartition("/")[0]
    for path in named:
        if path in folders:
            raise ValueError(f"{path!r} cannot be both a file and the folder of other files")
    return named


def _not_too_many(files: Any) -> Any:
    """Refuse too many files before any of them is looked at."""
    if isinstance(files, dict) and len(files) > MAX_INPUT_INODES:
        raise ValueError(f"expected at most {MAX_INPUT_INODES} files, got {len(files)}")
    return files


def _from_base64(content: Any) -> bytes:
    """Decode a file's content. SandboxFusion also takes null, and makes no file of it; see `RunCodeRequest.files`."""
    if not isinstance(content, str):
        raise ValueError("Input should be a valid string")
    try:
        return binascii.a2b_base64(content)
    except ValueError as exc:
        raise ValueError(f"expected base64: {exc}") from None


SessionId = Annotated[str, Field(min_length=1, max_length=128)]
Text = Annotated[str, PlainValidator(_text)]
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]
Path = Annotated[str, AfterValidator(_path_inside)]
Files = Annotated[
    dict[Path, Annotated[bytes, PlainValidator(_from_base64)] | None],
    AfterValidator(_can_be_made_together),
    BeforeValidator(_not_too_many),
]


class RunCodeRequest(BaseModel):
    """Body of `POST /run_code`; unknown fields are ignored."""

    code: Text
    language: Literal["python"]
    compile_timeout: Annotated[float, Field(ge=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)] = 10  # s, for queueing
    run_timeout: Timeout = 10  # s, wall clock
    # Address space, on top of what the preloaded packages take. With --allow-subprocess also of all processes together.
    memory_limit_MB: Annotated[int, Field(le=1 << 30)] = 1024  # <= 0: no limit
    stdin: Text | None = None
    files: Files = {}  # path: base64; null: no file
    fetch_files: Annotated[list[Path], FailFast(), Field(max_length=MAX_FETCHED)] = []
    queue_timeout: Timeout | None = None  # s; default compile_timeout + 5
    session_id: SessionId | None = None
    echo_last_expression: bool = False  # print what a last bare expression gives, as a Python prompt does


def _path_in_box(path: str) -> str:
    """Accept an absolute path in one of a box's folders."""
    spelled = "/" + _path_inside(path.removeprefix("/")).rstrip("/")
    if not path.startswith("/") or "//" in path or not is_inside(spelled, FOLDERS):
        raise ValueError(f"expected an absolute path below {', '.join(FOLDERS)}, got {path[:200]!r}")
    return spelled


BoxPath = Annotated[str, AfterValidator(_path_in_box)]


class OpenBoxRequest(BaseModel):
    """Body of `POST /v1/boxes/ID`."""

    archive: Annotated[bytes, PlainValidator(_from_base64)] = b""  # tar.gz in base64, with paths relative to /
    memory_limit_MB: Annotated[int, Field(ge=16, le=1 << 20)] = 1024  # of all processes of the box together
    disk_limit_MB: Annotated[int, Field(ge=1, le=1 << 20)] = 128  # of all its files, which are in memory as well
    workdir: BoxPath = "/app"
    queue_timeout: Timeout = 15  # s


class RunBoxRequest(BaseModel):
    """Body of `POST /v1/boxes/ID/run`."""

    command: Text
    run_timeout: Timeout = 10  # s, wall clock
    stdin: Text = ""
    queue_timeout: Timeout = 15  # s


class SealBoxRequest(BaseModel):
    """Body of `POST /v1/boxes/ID/seal`."""

    paths: Annotated[list[BoxPath], FailFast(), Field(max_length=MAX_FETCHED)]
    max_bytes: Annotated[int, Field(gt=0, le=MAX_FETCH_BYTES)] = 32 << 20  # of all that is read
    queue_timeout: Timeout = 15  # s


class RenewRequest(BaseModel):
    """Body of `POST /v1/sessions`."""

    session_ids: Annotated[list[SessionId], FailFast(), Field(max_length=MAX_RENEWED)]
