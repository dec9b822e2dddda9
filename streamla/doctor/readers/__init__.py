"""Readers of profiles, one file a format. `open_trace` finds out which one a file needs."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from streamla.doctor.events import DoctorError, Trace
from streamla.doctor.readers import chrome, csvs, ncu, nsys, rocprof_json

Progress = Callable[[int, int], None]
_SQLITE = b"SQLite format 3\x00"
_GZIP = b"\x1f\x8b"
_HEAD = 1 << 16


class _Counting(io.RawIOBase):
    """A file that reports how far it has been read."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close()
        self._size = os.path.getsize(path)
        self._progress = progress

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        n = self._file.readinto(buffer)
        self._progress(self._file.tell(), self._size)
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


def _open(path: Path, progress: Progress) -> IO[bytes]:
    raw = io.BufferedReader(_Counting(path, progress), 1 << 20)
    if raw.peek(2)[:2] == _GZIP:
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    return raw


def _head(f: IO[bytes]) -> bytes:
    """The beginning of a file, left unread."""
    if isinstance(f, io.BufferedReader):
        return f.peek(_HEAD)
    head = f.read(_HEAD)
    f.seek(0)
    return head


def open_trace(path: str | os.PathLike[str], progress: Progress = lambda at, size: None) -> Trace:
    """Read a profile.

    Args:
        path: a file of PyTorch's profiler (.json, .json.gz), Nsight Systems (.sqlite, or a csv of
            `nsys stats`), rocprofv3 (csv or json), rocprof (csv) or `ncu --csv`.
        progress: called with bytes read and bytes in the file.

    Raises:
        DoctorError: the file is missing, empty, cut off, damaged, or of no known format.
    """
    path = Path(path)
    try:
        return _read(path, progress)
    except DoctorError as e:
        raise DoctorError(f"{path}: {e}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise DoctorError(f"{path}: the gzip stream is damaged or cut off ({e})") from None
    except UnicodeDecodeError:
        raise DoctorError(f"{path}: not text, not gzip and not SQLite") from None
    except OSError as e:
        raise DoctorError(f"{path}: cannot be read ({e.strerror or e})") from None


def _read(path: Path, progress: Progress) -> Trace:
    if path.is_dir():
        raise DoctorError("is a directory; name one trace file")
    with open(path, "rb") as f:
        magic = f.read(16)
    if not magic:
        raise DoctorError("is empty")
    if magic == _SQLITE:
        trace = nsys.read_sqlite(path)
    else:
        with _open(path, progress) as f:
            head = _head(f)
            if not head.strip():
                raise DoctorError("is empty")
            first = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
            if first in (b"{", b"["):
                reader = rocprof_json if b'"rocprofiler-sdk-tool"' in head else chrome
                trace = reader.read(f, head, str(path))
            else:
                text = io.TextIOWrapper(cast(io.BufferedReader, f), encoding="utf-8", newline="")
                trace = csvs.read(text, str(path))
    if not len(trace) and not trace.counters:
        raise DoctorError(f"holds no GPU kernels (read as {trace.format})")
    return trace


__all__ = ["Progress", "chrome", "csvs", "ncu", "nsys", "open_trace", "rocprof_json"]
