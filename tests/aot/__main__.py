"""``python -m tests.aot``: compile every kernel for every target and print a table of verdicts."""

import argparse
import functools
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor

PROCESSES = 2


def _prepare() -> None:
    """Before the first import of Triton: real compilations, in a cache of their own."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("tests.aot compiles kernels: unset TRITON_INTERPRET.")
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.aot", description=__doc__)
    parser.add_argument("--all", action="store_true", help="list every kernel, not one line for each kernel and target")
    parser.add_argument("--only", nargs="+", metavar="OP", help="these operators' kernels alone")
    arguments = parser.parse_args()
    _prepare()
    from tests.aot.gate import judge_share

    start = time.monotonic()
    share = functools.partial(judge_share, shares=PROCESSES, ops=arguments.only)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
            verdicts = [v for part in pool.map(share, range(PROCESSES)) for v in part]
    _report(verdicts, arguments.all)
    failed = sum(bool(v.problem) for v in verdicts)
    print(f"{time.monotonic() - start:.0f} seconds")
    print(f"{len(verdicts) - failed} passed, {failed} failed")
    return 1 if failed or not verdicts else 0


def _report(verdicts, everything: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel", "target", "cases", "registers", "spilled", "16-byte loads", "verdict")
    groups = {}
    for verdict in sorted(verdicts, key=lambda v: (v.kernel, v.target)):
        groups.setdefault((verdict.kernel, verdict.target, verdict.case if everything else ""), []).append(verdict)
    for (kernel, target, case), group in groups.items():
        failed = [v for v in group if v.problem]
        vectors = sum(v.vector_loads >= v.wanted_loads > 0 for v in group), sum(v.wanted_loads > 0 for v in group)
        table.add_row(
            kernel,
            target,
            case or str(len(group)),
            f"{max(v.registers for v in group)}",
            str(max(v.spilled for v in group)),
            "{} of {}".format(*vectors),
            f"{len(failed)} failed" if failed else "ok",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for verdict in verdicts:
        if verdict.problem:
            print(f"FAILED {verdict.target} {verdict.kernel} [{verdict.case}]: {verdict.problem}")


if __name__ == "__main__":
    sys.exit(main())
