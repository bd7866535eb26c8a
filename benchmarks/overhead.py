"""What a run costs beside its decodes, in time and memory.

    python benchmarks/overhead.py [SUITE]        # default suites/reference.toml

Lists every decode that the run performs (judged, memory, oracle, reference), prints the whole run over theirs, and the
peak resident memory of the parent and of its largest worker. Times are core-seconds: with two workers, each on a core
of its own, the run has twice its wall time to spend.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

from fidelity import registry, report, runs, suite
from fidelity.pool import default_jobs


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "suites/reference.toml")
    start = time.perf_counter()
    registry.load_plugins()
    loaded = suite.load(path, registry)
    jobs = default_jobs("cpu")
    with tempfile.TemporaryDirectory() as folder:
        result = runs.execute(loaded, Path(folder), runs.Options(jobs=jobs))
        report.write_all(result, Path(folder))
        size = (Path(folder) / "report.html").stat().st_size
    wall = time.perf_counter() - start
    rows = {
        "judged": [case.seconds["decode"] for case in result.cases if "decode" in case.seconds],
        "memory": [case.seconds["memory"] for case in result.cases if "memory" in case.seconds],
        "oracle": [case.seconds["oracle"] for case in result.cases if "oracle" in case.seconds],
        "reference": [one.seconds for one in result.reference],
    }
    measure = sum(case.seconds.get("measure", 0.0) for case in result.cases)
    spent = sum(map(sum, rows.values()))
    for name, times in rows.items():
        print(f"{name:<10} {len(times):5} decodes {sum(times):8.1f} core-seconds")
    print(f"{'measuring':<10} {'':5}         {measure:8.1f} core-seconds")
    print(f"run: {wall:.1f} s wall on {jobs} workers = {wall * jobs:.1f} core-seconds")
    print(f"whole run over its decodes: {wall * jobs / spent:.3f} (limit 1.3)")
    for name, who in (("parent", resource.RUSAGE_SELF), ("largest worker", resource.RUSAGE_CHILDREN)):
        print(f"peak resident memory, {name}: {resource.getrusage(who).ru_maxrss / 2**10:.0f} MiB")
    print(f"report.html: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
