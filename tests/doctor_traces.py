"""Chrome traces made on the spot, for what a recorded trace does not show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

A16W8 = "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1"
REDUCE = "kn_mla_reduce_v1"
NORM = "fused_add_rms_norm_kernel"
EPILOGUE = "concat_and_cache_mla_kernel"
GEMM = "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"
LAYER = ((NORM, 4.0), (GEMM, 9.0), (EPILOGUE, 3.0), (A16W8, 100.0), (REDUCE, 6.0))
MI300X = {"id": 0, "name": "AMD Instinct MI300X", "numSms": 304}
H200 = {"id": 0, "name": "NVIDIA H200", "numSms": 132}


class Builder:
    """Kernels one after another on one stream."""

    def __init__(self, device: dict[str, Any] | None = None) -> None:
        self.device, self.events, self.now, self.correlation = device, [], 100.0, 1

    def kernel(
        self,
        name: str,
        us: float,
        grid: Any = None,
        gap: float = 0.5,
        correlation: int | None = None,
    ) -> None:
        args: dict[str, Any] = {"device": 0, "stream": 7}
        if grid is not None:
            args |= {"grid": list(grid), "block": [256, 1, 1]}
        if correlation is None:
            correlation, self.correlation = self.correlation, self.correlation + 1
        args["correlation"] = correlation
        self.now += gap
        self.events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7,
                            "ts": round(self.now, 3), "dur": us, "args": args})  # fmt: skip
        self.now += us

    def layer(self, kernels=LAYER, **k: Any) -> None:  # type: ignore[no-untyped-def]
        for name, us in kernels:
            self.kernel(name, us, **k)

    def mark(self, name: str, start: float, category: str = "gpu_user_annotation") -> None:
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7,
                            "ts": round(start, 3), "dur": round(self.now - start, 3)})  # fmt: skip

    def write(self, path: Path) -> Path:
        doc: dict[str, Any] = {"schemaVersion": 1}
        if self.device:
            doc["deviceProperties"] = [self.device]
        path.write_text(json.dumps({**doc, "traceEvents": self.events}))
        return path


def write_large(path: Path, size: int) -> int:
    """A trace of about `size` bytes in the proportions of a server's: host events outnumber kernels.
    Returns the number of kernels."""
    kernels, t, written = 0, 1000.0, 0
    host = '{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":7,"tid":7,"ts":%.3f,"dur":9.1,"args":{"External id":%d,"Input Dims":[[16,7168],[7168,576]]}},\n'
    gpu = '{"ph":"X","cat":"kernel","name":"%s","pid":0,"tid":7,"ts":%.3f,"dur":%.3f,"args":{"device":0,"stream":7,"correlation":%d,"grid":[1,1,132],"block":[256,1,1]}},\n'
    with path.open("w") as f:
        f.write(f'{{"schemaVersion":1,"deviceProperties":[{json.dumps(H200)}],"traceEvents":[\n')
        while written < size:
            for _ in range(61):
                for name, us in LAYER:
                    text = host % (t - 50, kernels) * 3 + gpu % (name, t, us, kernels)
                    f.write(text)
                    written += len(text)
                    kernels += 1
                    t += us + 0.5
            t += 400
        f.write('{"ph":"M","name":"process_name","pid":0,"args":{"name":"GPU 0"}}]}')
    return kernels
