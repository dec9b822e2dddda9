"""Disk cache of compiled kernels: any number of processes may share one directory.

An entry is the SHA-256 of its payload followed by the payload, written to a temporary file and moved
into place, so a reader sees a whole entry or none; a damaged one fails its digest and is built again.
A directory that cannot be read or written costs compile time and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

CACHE_VARIABLE = "STREAMLA_CACHE"
_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_dir() -> Path | None:
    """`$STREAMLA_CACHE`, or `streamla` in the user's cache directory; None if there is no home."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "streamla"
    except RuntimeError:  # a container's user without a home
        return None


def cache_key(parts: Iterable[str | bytes]) -> str:
    """Hash of everything that decides a result. Each part is length-prefixed: none runs into the next."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def get_or_build(key: str, build: Callable[[], bytes]) -> bytes:
    """The payload stored under `key`; if there is none, or a damaged one, `build()` and store it."""
    directory = cache_dir()
    if directory is None:
        return build()
    path = directory / key
    payload = _read(path)
    if payload is None:
        payload = build()
        _write(path, payload)
    return payload


def _read(path: Path) -> bytes | None:
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, payload = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def _write(path: Path, payload: bytes) -> None:
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The same directory: a rename within one file system is atomic.
        handle, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
