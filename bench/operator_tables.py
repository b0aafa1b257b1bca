"""The record of bench.operators as tables. Works from the JSON alone, so that a page can be made from it later."""

import math
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from bench.case import MOVING
from bench.peers.operator import OURS


def measurements(record: dict[str, Any]) -> Table:
    """Everything: a row for each implementation."""
    where = record["machine"].get("gpu", record["machine"]["device"])
    title = f"Forward plus backward, bfloat16, {where}; copy {record['copy_gb_per_s']:.0f} GB/s"
    if "host_floor" in record:
        title += f"; host time of a Python autograd function that does nothing {record['host_floor']['median']:.2f} ms"
    names = ("operator", "implementation", "ms", "20-80 %", "share", "peak MiB", "host ms", "error", "note")
    table = Table(*names, title=title, title_justify="left")
    for case in record["cases"]:
        label = f"{case['op']} {_shape(case)}"
        if case.get("failure"):
            table.add_row(label, "", "-", "-", "-", "-", "-", "-", case["failure"])
        if floor := case["floor"]:
            table.add_row(label, _floor_name(case), *_times(floor), _floor_share(case), "", "", "", "")
        for peer in case["peers"]:
            table.add_row(label, peer["name"], *_cells(case, peer))
        table.add_section()
    for case in record.get("not_run", ()):
        table.add_row(f"{case['op']} {_shape(case)}", "", "-", "-", "-", "-", "-", "-", "not run")
    return table


def summaries(record: dict[str, Any]) -> Iterator[Table]:
    """For each operator fusedops beside the fastest peer, a row for each shape."""
    for op in dict.fromkeys(case["op"] for case in record["cases"]):
        cases = [case for case in record["cases"] if case["op"] == op]
        names = (
            cases[0]["letters"], "ms", "share", "in reach", "fastest peer", "its ms", "its share", "peak MiB", "its peak MiB",
            "least peak of a peer", "host ms", "its host ms",
        )  # fmt: skip
        table = Table(*names, title=op, title_justify="left")
        for case in cases:
            table.add_row(_shape(case), *_summary(case))
        yield table


def fastest_peer(case: dict[str, Any]) -> dict[str, Any] | None:
    peers = [p for p in _timed(case) if p["name"] != OURS]
    return min(peers, key=lambda p: p["device"]["median"], default=None)


def ours(case: dict[str, Any]) -> dict[str, Any] | None:
    return next((p for p in _timed(case) if p["name"] == OURS), None)


def _timed(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [p for p in case["peers"] if "device" in p]


def _summary(case: dict[str, Any]) -> list[str]:
    mine, other = ours(case), fastest_peer(case)
    least = min((p for p in _timed(case) if p["name"] != OURS), key=lambda p: p["peak_mib"], default=None)
    return [
        ms(mine),
        _share(case, mine),
        _floor_share(case) if case["floor"] else "-",
        other["name"] if other else "-",
        ms(other),
        _share(case, other),
        mib(mine),
        mib(other),
        f"{least['peak_mib']:.0f}, {least['name']}" if least else "-",
        _host(mine),
        _host(other),
    ]


def _shape(case: dict[str, Any]) -> str:
    return "x".join(map(str, case["shape"]))


def _floor_name(case: dict[str, Any]) -> str:
    return case["floor"].get("name", "three bare GEMMs")


def _floor_share(case: dict[str, Any]) -> str:
    share = case["floor"].get("share_of_copy")
    return f"{share:.0%} copy" if share and _floor_name(case) == MOVING else "100% floor"


def _share(case: dict[str, Any], peer: dict[str, Any] | None) -> str:
    """Of the operator's own floor where it has one, otherwise of the copy rate."""
    if peer is None:
        return "-"
    if case["floor"] and _floor_name(case) != MOVING:
        return f"{peer['share_of_floor']:.0%} floor"
    return f"{peer['share_of_copy']:.0%} copy"


def _times(timing: dict[str, Any]) -> tuple[str, str]:
    return f"{timing['median']:.3f}", f"{timing['q20']:.3f}-{timing['q80']:.3f}"


def ms(peer: dict[str, Any] | None) -> str:
    return f"{peer['device']['median']:.3f}" if peer else "-"


def mib(peer: dict[str, Any] | None) -> str:
    return f"{peer['peak_mib']:.0f}" if peer else "-"


def _host(peer: dict[str, Any] | None) -> str:
    return f"{peer['host_ms']:.2f}" if peer else "-"


def _cells(case: dict[str, Any], peer: dict[str, Any]) -> list[str]:
    worst = max(peer["errors"].values(), default=math.nan)
    error = "-" if math.isnan(worst) else f"{worst:.1e}"
    if "device" not in peer:
        return ["-", "-", "-", "-", "-", error, peer["failure"] or ""]
    method = peer["device"]["method"]
    note = peer["failure"] or ("" if method == "CUDA graph" else method)
    return [*_times(peer["device"]), _share(case, peer), mib(peer), _host(peer), error, note]
