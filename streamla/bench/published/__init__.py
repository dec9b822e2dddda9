"""Tables that others have published, as records. Their times were measured elsewhere, and none here."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from streamla.bench.records import Record
from streamla.spec import MLASpec

PUBLISHED = "published"  # the version of such a record
_COLUMNS = {"aiter_us": "aiter, MI300X", "tuned_us": "study, MI300X"}


def mi300x_blog() -> list[Record]:
    """The MI300X study: aiter's kernel and the study's own, 14 shapes each."""
    spec = MLASpec(16, "fp8_e4m3fnuz", page_size=1)
    lines = (Path(__file__).parent / "mi300x_blog.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    records = []
    for row in rows:
        context, requests = 1024 * int(row["context"].rstrip("K")), int(row["requests"])
        tokens = context * requests
        for column, name in _COLUMNS.items():
            us = float(row[column])
            records.append(
                Record(
                    grid="blog",
                    num_heads=spec.num_heads,
                    kv_format=spec.kv_format.value,
                    page_size=spec.page_size,
                    seqlen_q=1,
                    context=context,
                    requests=requests,
                    tokens=tokens,
                    cache_seqlens=None,
                    bytes=tokens * spec.row_bytes,
                    impl=name,
                    version=PUBLISHED,
                    exact=True,
                    peer=True,
                    read_bytes=tokens * spec.row_bytes,
                    us=us,
                    gbps=tokens * spec.row_bytes / us / 1e3,
                )
            )
    return records


TABLES: dict[str, Callable[[], list[Record]]] = {"mi300x-blog": mi300x_blog}


def table(name: str) -> list[Record]:
    """The records of a published table; ValueError names those there are."""
    if name not in TABLES:
        raise ValueError(f"against: need one of {', '.join(TABLES)}; got {name!r}")
    return TABLES[name]()
