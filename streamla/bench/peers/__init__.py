"""Other libraries' kernels on the same inputs, found at run time. One small file a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamla.bench.candidates import NONE
from streamla.bench.peers.aiter import Aiter
from streamla.bench.peers.base import Peer
from streamla.bench.peers.fa3 import FA3
from streamla.bench.peers.flashinfer import FlashInfer
from streamla.bench.peers.flashmla import FlashMLABF16, FlashMLAQuantised, TokenspeedFlashMLA
from streamla.bench.peers.tileops import TileOPs
from streamla.bench.peers.torch_baseline import TorchEager, TorchSDPA
from streamla.bench.peers.vllm_triton import VLLMTriton

PEERS: tuple[Peer, ...] = (
    FlashMLAQuantised(),
    FlashMLABF16(),
    TokenspeedFlashMLA(),
    FA3(),
    FlashInfer("fa2", "stored"),
    FlashInfer("fa3", "stored"),
    FlashInfer("fa2", "bf16"),
    FlashInfer("fa3", "bf16"),
    VLLMTriton(),
    TileOPs("stored"),
    TileOPs("bf16"),
    Aiter(),
    TorchEager(),
    TorchSDPA(),
)
ALL = "all"


@dataclass(frozen=True)
class Absent:
    """A peer that was asked for and is not here: why, and the line that installs it."""

    name: str
    reason: str
    install: str


def find(names: Sequence[str]) -> tuple[list[Peer], list[Absent]]:
    """The peers called `names` that can be imported, and those that cannot.

    Args:
        names: names of peers; ["all"] is every one, ["none"] is none.
    """
    known = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in known and name not in (ALL, NONE):
            raise ValueError(
                f"peers: need {ALL}, {NONE} or some of {', '.join(known)}; got {name!r}"
            )
    wanted = PEERS if ALL in names else tuple(known[n] for n in names if n != NONE)
    found, absent = [], []
    for peer in wanted:
        reason = peer.load()
        if reason is None:
            found.append(peer)
        else:
            absent.append(Absent(peer.name, reason, peer.install))
    return found, absent
