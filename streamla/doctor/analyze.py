"""From a trace to a report: groups, findings, windows, notes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from streamla.doctor import counters, findings, groups, steps, windows
from streamla.doctor.events import DoctorError, Trace
from streamla.doctor.groups import Group
from streamla.doctor.names import decode, padding
from streamla.doctor.stats import RULE
from streamla.doctor.workload import Gpu, Workload


@dataclass
class Report:
    """Attributes:
    trace, gpu, workload: what was read, and what the user said of it.
    groups: attention kernels by grid and workload.
    timeline: None for a profile without times.
    times: of steps, for each workload; none for a profile without times.
    counted: attention kernels of a counter file.
    findings: largest waste first.
    notes: what the user should know beside them.
    """

    trace: Trace
    gpu: Gpu | None
    workload: Workload
    groups: list[Group]
    timeline: steps.Timeline | None
    times: list[windows.StepTimes]
    counted: list[counters.Counted]
    findings: list[findings.Finding]
    notes: list[str]

    @property
    def complete(self) -> bool:
        return self.timeline is None or not self.timeline.incomplete

    @property
    def busiest(self) -> list[tuple[str, str, int]]:
        """Kernels by total time: name, role, ns."""
        time: Counter[int] = Counter()
        for i in range(len(self.trace)):
            start, end = self.trace.interval(i)
            time[self.trace.name_id(i)] += (end - start) * (
                1 if self.trace.timed else self.trace[i].count
            )
        return [
            (k.short, k.role, t)
            for n, t in time.most_common(12)
            if (k := decode(self.trace.names[n]))
        ]  # fmt: skip


def _notes(report: Report) -> list[str]:
    notes = list(report.trace.notes)
    if report.timeline and report.timeline.incomplete:
        notes.append(report.timeline.incomplete)
    if len(report.trace) and not report.groups:
        top = ", ".join(f"{name} ({role})" for name, role, _ in report.busiest[:5])
        notes.append(f"no MLA decode attention kernel is in this trace; most time goes to {top}")
    if report.groups and report.gpu is None:
        notes.append("the trace does not name its GPU: give --gpu for units and memory rate")
    if (
        report.groups
        and report.workload.heads is None
        and not any(g.workload.heads for g in report.groups)
    ):
        notes.append("give --heads (and --q-len) to see padding")
    if report.groups and not any(g.workload.total for g in report.groups):
        notes.append("give --requests and --context to see the share of the memory roof")
    unknown = {g.kernel.short for g in report.groups if g.grid is None}
    if unknown and report.trace.timed:
        notes.append(
            f"the trace has no grid for {', '.join(sorted(unknown))}: how much of the GPU it fills is unknown"
        )
    lists = {
        g.kernel.short
        for g in report.groups
        if g.kernel.persistent and g.kernel.family == "aiter-asm-mla"
    }
    if lists:
        notes.append(
            f"{', '.join(sorted(lists))} is persistent: its grid fills the GPU whether or not the engine's list of "
            "work does. `streamla doctor predict` knows the engines' caps on splits."
        )
    for group in report.groups:
        if group.kernel.unknown:
            notes.append(f"{group.kernel.short}: not understood: {', '.join(group.kernel.unknown)}")
    if report.trace.timed and not report.complete:
        notes.append(
            "lost events also lengthen gaps and windows: take those figures as upper bounds"
        )
    return list(dict.fromkeys(notes))


def analyze(
    trace: Trace,
    gpu: Gpu | None,
    workload: Workload,
    layers: int | None = None,
    from_pattern: str = windows.RESIDUAL,
) -> Report:
    """Report on a trace.

    Args:
        trace: what a reader returned.
        gpu: its GPU, None if unknown.
        workload: what the user knows of the steps; annotations in the trace win over it.
        layers: attention layers of the model, None to find out.
        from_pattern: the kernel that opens a window (a regular expression).
    """
    if layers is not None and layers < 1:
        raise DoctorError(f"--layers: need an integer >= 1; got {layers}")
    timeline = None
    times: list[windows.StepTimes] = []
    found: list[Group] = []
    if len(trace) and trace.timed:
        timeline = steps.build(trace, layers)
        found = groups.of_timeline(timeline, workload)
        times = windows.measure(timeline, workload, from_pattern)
    elif len(trace):
        found = groups.of_summary(trace, workload)
    counted = counters.counted(trace)
    whole = timeline if timeline and timeline.steps else None
    all_findings = findings.find(found, gpu, whole, workload) + counters.find(counted, workload)
    report = Report(trace, gpu, workload, found, timeline, times, counted, all_findings, [])
    report.notes = _notes(report)
    return report


def _group_json(group: Group) -> dict[str, Any]:
    kernel, w = group.kernel, group.workload
    return {
        "kernel": kernel.text, "family": kernel.family, "q_dtype": kernel.q_dtype, "kv_dtype": kernel.kv_dtype,
        "tile_heads": kernel.tile_heads, "tile_q_rows": kernel.tile_q_rows, "persistent": kernel.persistent,
        "split": kernel.split, "merge": kernel.merge, "unknown": list(kernel.unknown),
        "padding": padding(kernel, w.heads, w.q_len) if w.heads else None,
        "grid": group.grid, "programs": group.programs, "launches": group.launches,
        "attention_us": group.attention_ns / 1e3, "merge_us": group.merge_ns / 1e3 if group.merge else None,
        "workload": {k: v for k, v in asdict(w).items() if v is not None},
    }  # fmt: skip


def as_json(report: Report) -> dict[str, Any]:
    """The report for machines."""
    timeline = report.timeline
    out: dict[str, Any] = {
        "source": report.trace.source,
        "format": report.trace.format,
        "gpu": None if report.gpu is None else {"name": report.gpu.name, "units": report.gpu.units},
        "complete": report.complete,
        "notes": report.notes,
        "findings": [asdict(f) for f in report.findings],
        "kernels": [_group_json(g) for g in report.groups],
    }
    if timeline is not None:
        out["steps"] = {
            "count": len(timeline.steps), "whole": len(timeline.whole_steps),
            "layers": timeline.layers_per_step, "device": timeline.device,
        }  # fmt: skip
        out["rule"] = RULE
        out["times"] = [asdict(t) for t in report.times]
    if report.counted:
        out["counters"] = [
            {
                "kernel": c.kernel.text,
                "launches": c.launches,
                "read_bytes": c.read_bytes,
                "dur_ns": c.dur_ns,
            }
            for c in report.counted
        ]
    return out
