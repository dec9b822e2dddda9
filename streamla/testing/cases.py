"""Named cases, each with the reason it is here. `build.py` makes the inputs, `verify.py` runs them.

A case is data. Every kind of fault that users of paged MLA decode have met has at least one case, and
is small enough for a CPU; those that need a GPU's memory or its many programs say `gpu=True`.
Whatever a case says, every run of it also has NaN-filled outputs and workspaces, garbage in the plan's
buffers, wild page ids past the last needed column, poison in every cache byte that no request owns,
and canaries around everything written.
"""

from __future__ import annotations

from collections.abc import Iterator

from streamla.spec import KVFormat
from streamla.testing.case import Case

HEAD_COUNTS = (1, 3, 4, 5, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128)
FORMATS = tuple(fmt.value for fmt in KVFormat)


def _empty() -> Iterator[Case]:
    yield Case(
        "empty-first", "an empty row beside a full one: (0, -inf), not +inf or stale NaN", (0, 7),
    )  # fmt: skip
    yield Case(
        "empty-middle-last",
        "padded rows of a captured batch: written although nothing is attended",
        (130, 1, 64, 0, 65, 9, 0, 0),
    )  # fmt: skip
    yield Case("empty-all", "a whole batch without tokens", (0, 0, 0), kv_format="bf16")
    yield Case(
        "empty-minus-one",
        "ceil(0 / page) - 1 must not become an index; engines pad tables with -1", (0, 33, 0),
        garbage=-1,
    )  # fmt: skip
    yield Case(
        "empty-int-max", "a padded row whose table holds the largest page id", (0, 33, 0),
        garbage=2**31 - 1,
    )  # fmt: skip
    yield Case("empty-no-columns", "a page table of width 0", (0, 0), table_extra=0)
    yield Case("no-requests", "a batch of 0 is a valid batch", ())
    yield Case(
        "empty-tail-wide-bound",
        "padded rows under a bound far above every length: the bound must not decide what is written",
        (130, 1, 64, 65, 9, 0, 0, 0), max_seqlen=131072,
    )  # fmt: skip
    yield Case(
        "empty-queries",
        "requests shorter than seqlen_q: the first queries see nothing, the last see something",
        (0, 1, 2, 3, 4, 5), seqlen_q=4, num_heads=8,
    )  # fmt: skip


def _pages() -> Iterator[Case]:
    for fmt in ("bf16", "fp8_e4m3fn"):
        for page_size in (1, 16, 32, 64, 128):
            yield Case(
                f"tail-{fmt}-page-{page_size}",
                "0 * NaN leaks through P x V when only the scores of a page's tail are masked",
                (1, 13, 63, 64, 65, 127, 129), kv_format=fmt, page_size=page_size, num_heads=8,
            )  # fmt: skip
    yield Case(
        "tail-page-480",
        "the page of a hybrid model: neither a power of two nor a multiple of the tile",
        (479, 480, 481), page_size=480,
    )  # fmt: skip
    yield Case(
        "tail-page-7", "an odd page and prime lengths: tiles begin anywhere in a page", (127, 251),
        page_size=7, kv_format="bf16", num_heads=8,
    )  # fmt: skip
    for page_size in (1, 16, 64):
        yield Case(
            f"tail-ds-mla-page-{page_size}", "scales inside the row are poison too past the last token",
            (1, 13, 63, 64, 65, 127), kv_format="fp8_ds_mla", page_size=page_size,
        )  # fmt: skip
    for part in ("latent", "rope"):
        yield Case(
            f"tail-{part}-only", f"NaN in the {part} part alone: each part has its own mask",
            (1, 63, 65), poisons=(f"nan_{part}",),
        )  # fmt: skip
    yield Case(
        "tail-infinity", "Inf in the tail: 0 * Inf is NaN as well", (1, 63, 65), kv_format="bf16",
        poisons=("inf",),
    )  # fmt: skip
    for name, garbage in (("minus-one", -1), ("int-max", 2**31 - 1), ("int-min", -(2**31))):
        yield Case(
            f"wild-pages-{name}",
            "a tile spans several pages; the table must not be followed past the last needed column",
            (17, 1, 47), page_size=16, garbage=garbage,
        )  # fmt: skip
    yield Case(
        "wild-pages-none", "the table ends at the last needed column, in the middle of a tile",
        (17, 33, 1), page_size=16, table_extra=0,
    )  # fmt: skip
    yield Case(
        "shared-pages",
        "prefix caching: requests share pages, and one page may appear twice in a request",
        (300, 200, 129, 64), distinct_pages=3,
    )  # fmt: skip
    yield Case(
        "half-table",
        "a batch whose lengths differ by 1000 times: most of the table is past the end",
        (1, 1000, 2, 3), page_size=16,
    )  # fmt: skip


def _splits() -> Iterator[Case]:
    yield Case(
        "tiles-1-to-9", "odd and even tile counts through a pipeline of two stages",
        tuple(64 * k for k in range(1, 10)),
    )  # fmt: skip
    yield Case(
        "tiles-1-to-5-bf16", "odd and even tile counts, and one token more or less",
        tuple(64 * k + d for k in (1, 2, 3, 5) for d in (-1, 1)), kv_format="bf16",
    )  # fmt: skip
    yield Case(
        "few-tokens", "more programs than tokens: no program may leave a partial unwritten",
        (1, 2, 3, 31, 32, 33, 64),
    )  # fmt: skip
    yield Case("one-token", "the smallest request, alone", (1,))
    yield Case("one-long", "one request over all programs: every program is a split", (1500,))
    yield Case(
        "short-beside-long", "one split and many in one launch: both write out and lse", (5, 1200),
        kv_format="bf16",
    )  # fmt: skip
    yield Case(
        "ragged", "a mixed batch: empty, short and long", (0, 1, 700, 17, 64, 0, 333), num_heads=12,
    )  # fmt: skip
    yield Case(
        "many-rows",
        "a ramp of rows with one query each: the error bound is a row's, not the mean's",
        tuple(range(1, 129, 4)), num_heads=8,
    )  # fmt: skip
    yield Case(
        "batch-invariant", "split points that depend on a request's own length only",
        (640, 1, 0, 129, 65), batch_invariant=True,
    )  # fmt: skip
    yield Case(
        "identical-rows",
        "equal requests in one batch-invariant batch must be equal to the last bit", (200,) * 5,
        batch_invariant=True, data="identical",
    )  # fmt: skip


def _heads() -> Iterator[Case]:
    for heads in HEAD_COUNTS:
        yield Case(
            f"heads-{heads}",
            "head h asks for latent h, NaN lies after the last head: a swapped or padded head shows",
            (65, 3), num_heads=heads, data="one-hot", query_layout="padded",
        )  # fmt: skip
    for heads in (12, 24, 128):
        yield Case(
            f"heads-{heads}-bf16",
            "head counts that do not divide the tile, in the other element size", (65, 3),
            num_heads=heads, kv_format="bf16",
        )  # fmt: skip


def _queries() -> Iterator[Case]:
    for seqlen_q in (2, 3, 4):
        for heads in (12, 16):
            yield Case(
                f"causal-{seqlen_q}-heads-{heads}",
                "verification of drafts: the queries end at 64, in a page and at its border",
                (64, 65, 100, 2), seqlen_q=seqlen_q, num_heads=heads, data="spike",
            )  # fmt: skip
    yield Case(
        "causal-4-ds-mla", "a hidden row's scales are hidden too", (64, 65, 100, 2), seqlen_q=4,
        num_heads=8, data="spike", kv_format="fp8_ds_mla",
    )  # fmt: skip
    yield Case(
        "not-causal", "the causal flag is obeyed, not wired", (64, 65, 3), seqlen_q=4, causal=False,
        data="spike",
    )  # fmt: skip
    yield Case(
        "not-causal-bf16", "the causal flag in the other element size", (64, 65, 3), seqlen_q=4,
        causal=False, kv_format="bf16", data="spike",
    )  # fmt: skip
    yield Case(
        "causal-96-heads", "96 heads x 4 queries: 384 query rows of one request", (66,),
        seqlen_q=4, num_heads=96,
    )  # fmt: skip
    yield Case(
        "causal-split", "a causal query may see nothing of the last split", (513, 449), seqlen_q=4,
        num_heads=4, kv_format="bf16",
    )  # fmt: skip
    for rank in (32, 64):
        yield Case(
            f"causal-2-small-widths-{rank}",
            "a compiler that overlaps the loads of tiles may mix them up beside causal products",
            (200, 33, 17, 2), seqlen_q=2, num_heads=4, kv_format="bf16", page_size=16,
            kv_lora_rank=rank, qk_rope_head_dim=16,
        )  # fmt: skip
    yield Case(
        "more-query-rows-than-requests", "batch * seqlen_q rows and a table of batch rows",
        tuple(1 + (7 * b) % 40 for b in range(20)), seqlen_q=3, num_heads=8,
    )  # fmt: skip


def _formats() -> Iterator[Case]:
    for fmt in FORMATS:
        yield Case(
            f"format-{fmt}", "every format, rows in pages in random order", (200, 1, 77),
            kv_format=fmt, num_heads=4, keep_width=True,
        )  # fmt: skip
        yield Case(
            f"one-key-{fmt}", "one key has weight 1: the output is the stored row times its scale, rounded once",
            (1,) * 4, kv_format=fmt, data="all-bytes",
        )  # fmt: skip
    for heads in (16, 64, 96):
        yield Case(
            f"one-key-high-scores-heads-{heads}", "a rounded reference cancels from the one key; 18.5 makes ties",
            (1,) * 8, k_scale=18.5, num_heads=heads, data="all-bytes",
        )  # fmt: skip
    for scale in (0.37, 1.0, 5.3):
        yield Case(f"scale-{scale}", "the scale reaches both scores and values", (130, 65), k_scale=scale)  # fmt: skip
    for heads in (8, 16, 24):
        yield Case(
            f"scales-ds-mla-heads-{heads}", "every token scales its groups of latents by numbers of its own",
            (200, 2, 577), kv_format="fp8_ds_mla", num_heads=heads, data="odd-scales",
        )  # fmt: skip
    yield Case(
        "small-widths", "a model for tests: widths are facts of the spec, not constants of the kernel",
        (130, 1, 64), kv_format="bf16", kv_lora_rank=64, qk_rope_head_dim=16, num_heads=4,
        page_size=16,
    )  # fmt: skip


def _scores() -> Iterator[Case]:
    yield Case(
        "equal-scores", "all scores 0: lse is ln n, not log2 n", (4, 1, 200), data="zero-query",
    )  # fmt: skip
    yield Case(
        "equal-scores-base-2", "lse in base 2 on request", (4, 0, 700), data="zero-query",
        lse_base="2",
    )  # fmt: skip
    yield Case(
        "base-2", "lse in base 2 from both a whole and a split request", (5, 1000), lse_base="2",
        kv_format="bf16",
    )  # fmt: skip
    for offset in (300, -300):
        yield Case(
            f"offset{offset:+}",
            "a large lse kept in a narrow type loses the weights of the splits", (900, 5),
            data=f"offset{offset:+}",
        )  # fmt: skip
    for score in ("+1e4", "-1e4"):
        yield Case(
            f"constant{score}", "scores far outside the range of exp", (300, 2),
            data=f"constant{score}", kv_format="bf16",
        )  # fmt: skip
    yield Case(
        "peaked", "one key takes all the weight; the running maximum changes often", (300, 65),
        data="peaked",
    )  # fmt: skip
    yield Case(
        "rising", "every tile has a larger maximum than all before it", (513,), data="rising",
    )  # fmt: skip
    yield Case(
        "alternating", "latents +1 and -1 in turn under equal scores: a narrow running sum stalls",
        (2048,), data="alternating", distinct_pages=1,
    )  # fmt: skip
    yield Case(
        "nan-head", "a query head of NaN spoils no other head", (130, 65, 3), data="nan-head",
    )  # fmt: skip
    yield Case(
        "nan-row", "NaN in a valid row shows, in its own request alone", (130, 65, 3),
        data="nan-row",
    )  # fmt: skip
    yield Case(
        "nan-row-ds-mla", "NaN shows whatever the group's scale is, in its own request alone",
        (130, 65, 3), data="nan-row", kv_format="fp8_ds_mla",
    )  # fmt: skip


def _strides() -> Iterator[Case]:
    for layers in (2, 61):
        yield Case(
            f"layers-{layers}",
            "layers interleaved in one allocation: neighbours in memory are other layers' pages",
            (130, 65), page_stride=layers,
        )  # fmt: skip
    yield Case(
        "page-gap-fp8",
        "a page stride that is no multiple of the page: it must be read, not rebuilt", (130, 65),
        page_gap=128,
    )  # fmt: skip
    yield Case(
        "page-gap-bf16", "the same in the other element size", (130, 65), page_gap=256,
        kv_format="bf16",
    )  # fmt: skip
    for gap in (64, 80):
        yield Case(
            f"row-stride-{576 + gap}", "rows padded to a wider stride", (130, 65), row_gap=gap,
        )  # fmt: skip
    yield Case(
        "row-stride-672-ds-mla", "rows of 656 bytes padded to a wider stride", (130, 65), row_gap=16,
        kv_format="fp8_ds_mla",
    )  # fmt: skip
    yield Case(
        "layers-2-ds-mla", "interleaved layers of 656-byte rows", (130, 65), page_stride=2,
        kv_format="fp8_ds_mla",
    )  # fmt: skip
    yield Case(
        "query-halves",
        "q_nope from a transposed product and q_pe from a wider projection: heads lie far apart",
        (65, 130, 1), num_heads=32, query_layout="halves",
    )  # fmt: skip
    yield Case(
        "query-halves-one-row", "one row: strides of size-1 dimensions mean nothing", (65,),
        query_layout="halves",
    )  # fmt: skip
    yield Case(
        "query-halves-causal", "far-apart heads and several queries", (65, 7), seqlen_q=2,
        num_heads=12, kv_format="bf16", query_layout="halves",
    )  # fmt: skip


def _gpu() -> Iterator[Case]:
    yield Case(
        "gpu-128k-x4", "the blog's shapes: every program works, requests are split", (131072,) * 4,
        gpu=True,
    )  # fmt: skip
    yield Case("gpu-one-128k", "one request over the whole machine", (131072,), gpu=True)
    yield Case(
        "gpu-ragged", "lengths that halve: no program may own more than its share",
        tuple(262144 >> k for k in range(8)), gpu=True,
    )  # fmt: skip
    yield Case(
        "gpu-one-long-many-short", "one straggler beside 127 rows of one token",
        (1,) * 127 + (131072,), gpu=True,
    )  # fmt: skip
    yield Case(
        "gpu-tiles", "odd and even numbers of tiles in every program",
        tuple(64 * k - k % 3 for k in range(301, 333)), gpu=True,
    )  # fmt: skip
    yield Case(
        "gpu-tiles-bf16", "odd and even numbers of tiles in the other element size",
        tuple(64 * k - k % 3 for k in range(301, 317)), kv_format="bf16", gpu=True,
    )  # fmt: skip
    yield Case(
        "gpu-tiles-ds-mla", "odd and even numbers of tiles of 656-byte rows, each scaled by itself",
        tuple(64 * k - k % 3 for k in range(301, 333)), kv_format="fp8_ds_mla", data="odd-scales",
        gpu=True,
    )  # fmt: skip
    yield Case(
        "gpu-ramp-4096", "4096 rows of 1 to 4096 tokens: items of every size in one program",
        tuple(range(1, 4097)), num_heads=8, distinct_pages=4096, gpu=True,
    )  # fmt: skip
    yield Case(
        "gpu-million", "a million tokens of one page: the sum must not stall, lse = ln 1048576",
        (1 << 20,), data="alternating", distinct_pages=1, gpu=True,
    )  # fmt: skip
    yield Case(
        "gpu-causal-long", "four queries over long requests, at 64 heads", (30001, 4096, 70000),
        seqlen_q=4, num_heads=64, gpu=True,
    )  # fmt: skip
    yield Case(
        "gpu-invariant-long", "batch-invariant splits of long requests", (70000, 1, 5000, 0),
        batch_invariant=True, gpu=True,
    )  # fmt: skip
    for fmt, pages in (
        ("fp8_e4m3fn", 58_260),
        ("fp8_e4m3fn", 116_520),
        ("bf16", 58_260),
        ("bf16", 116_520),
    ):
        yield Case(
            f"gpu-pool-{fmt}-{pages}",
            "page ids whose offsets cross 2^31 or 2^32, in bytes or elements, against low page ids",
            (600, 65), kv_format=fmt, pool_pages=pages, gpu=True,
        )  # fmt: skip
    for pages in (960, 1915):
        yield Case(
            f"gpu-layers-61-{pages}",
            "interleaved layers: page 955 of 61 layers crosses 2^31 bytes", (600, 65),
            page_stride=61, pool_pages=pages, gpu=True,
        )  # fmt: skip


CASES: tuple[Case, ...] = (
    *_empty(),
    *_pages(),
    *_splits(),
    *_heads(),
    *_queries(),
    *_formats(),
    *_scores(),
    *_strides(),
    *_gpu(),
)


def case_by_name(name: str) -> Case:
    """The case called `name`; ValueError if there is none."""
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"case: none is called {name!r}")
