"""What the tests of boxes share: a client's boxes on a real server, and archives."""

import io
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from verl_ext.sandbox import Box, SandboxClient
from verl_ext.sandbox.probe import ping


def need_boxes(url: str) -> None:
    """Skip if the machine cannot isolate boxes."""
    if why := ping(url)["no_boxes"]:
        pytest.skip(why)


@asynccontextmanager
async def opened(client: SandboxClient, files: Mapping[str, str | bytes] = {}, **options: object) -> AsyncIterator[Box]:
    box = Box(client, **options)
    try:
        await box.open(packed(files))
        yield box
    finally:
        await box.close()


def packed(files: Mapping[str, str | bytes | tarfile.TarInfo]) -> bytes:
    """Return a tar.gz; a content may also be a header without one."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path, content in files.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            content = content.encode() if isinstance(content, str) else content
            header = tarfile.TarInfo(path)
            header.size, header.mode = len(content), 0o644
            tar.addfile(header, io.BytesIO(content))
    return archive.getvalue()


def unpacked(archive: bytes) -> dict[str, bytes | str | None]:
    """Return contents by path; a link's target as str, None for a folder."""
    found: dict[str, bytes | str | None] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member).read() if member.isreg() else member.linkname if member.issym() else None
            found[member.name] = content
    return found
