"""Worker processes: each on a core set of its own, each replaced when it dies, and only its own case lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from fidelity import exhaustion
from fidelity.environment import cores
from fidelity.errors import EvaluationError, RequestError, WorkerDied
from fidelity.memory.limit import ENVIRONMENT
from fidelity.worker import Done, Ready, Refused, Reply, Setup, Task

KERNEL_COUNTS = Path("/proc/vmstat")


def default_jobs(device: str) -> int:
    """Two workers where there are cores for two; one on an accelerator, which no two measured decodes may share."""
    return 1 if device != "cpu" else min(2, cores())


def core_sets(jobs: int) -> list[tuple[int, ...]]:
    """Disjoint, equal sets of the cores that this process may use. Raises RequestError if there are too few."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(cores()))
    if not 1 <= jobs <= len(usable):
        raise RequestError(f"--jobs {jobs}: from 1 to {len(usable)} here, since no two measured decodes share a core")
    each = len(usable) // jobs
    return [tuple(usable[i * each : (i + 1) * each]) for i in range(jobs)]


class Worker:
    """One worker process and its pipe."""

    def __init__(self, setup: Setup, log: Path):
        self.setup, self.log = setup, log
        self._process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, Any] = {}
        self._kills: int | None = None
        """The kernel's count before the task that goes on."""

    def start(self) -> None:
        """Start the process and wait until it is ready. Raises RequestError or WorkerDied."""
        threads = str(self.setup.threads)
        variables = {**os.environ, **ENVIRONMENT, "KINETO_LOG_LEVEL": "99"}
        variables |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if self.setup.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""  # accelerate asks for CUDA at each hook, a tenth of such a decode
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fidelity.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=variables,
            )
        self._send(self.setup)
        reply = self._receive()
        if isinstance(reply, Refused):
            raise (RequestError if reply.wrong_request else EvaluationError)(reply.message)
        assert isinstance(reply, Ready)
        self.environment = reply.environment

    def ask(self, task: Task) -> Iterator[Reply]:
        """Send a task and yield its replies but for the closing Done. Raises WorkerDied if the process ends."""
        if self._process is None:
            self.start()
        self._kills = out_of_memory_kills()
        self._send(task)
        while not isinstance(reply := self._receive(), Done):
            yield reply

    def stop(self) -> None:
        """End the process; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            try:
                pipe.close()  # type: ignore[union-attr]
            except BrokenPipeError:  # what was still buffered for a process that is gone
                continue
        process.wait()

    def _send(self, message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._died()

    def _receive(self) -> Reply:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._died()
        return msgspec.json.decode(line, type=Reply)

    def _died(self) -> None:
        assert self._process is not None
        status = self._process.wait()
        self.stop()
        name = signal.Signals(-status).name if status < 0 else ""
        how, of_memory = f"was killed by {name}" if name else f"ended with status {status}", None
        if name == "SIGKILL":
            said, of_memory = _who_killed(self._kills, out_of_memory_kills())
            how += f" ({said})"
        last = self.log.read_text(errors="replace").strip().rpartition("\n")[2][:200]
        error = WorkerDied(f"the worker process {how}" + (f"; its last words: {last}" if last else ""))
        error.of_memory = _speaks_of_memory(last) or of_memory
        raise error


def out_of_memory_kills() -> int | None:
    """How many processes this kernel has killed for memory (`oom_kill` of proc(5)'s vmstat); None where it counts
    none."""
    try:
        lines = KERNEL_COUNTS.read_text().splitlines()
    except OSError:  # no Linux
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _who_killed(before: int | None, after: int | None) -> tuple[str, bool | None]:
    """In words, and whether it was the kernel for memory."""
    if before is None or after is None:
        return "out of memory, if nobody else did it", None
    if after == before:
        return "not for memory: the kernel counted no such kill", False
    return f"out of memory: the kernel counted {after - before} such kills meanwhile", True


def _speaks_of_memory(words: str) -> bool | None:
    """True where a process's last words are an allocator's: C++ ends a process that cannot be told."""
    try:
        exhaustion.parse(words)
    except RequestError:
        return None
    return True


class Pool:
    """Workers that share out tasks. Use as a context manager; leaving it ends every worker."""

    def __init__(self, setup: Setup, jobs: int, logs: Path, threads: int | None = None):
        sets = core_sets(jobs) if setup.device == "cpu" else [()] * jobs
        self.workers = [
            Worker(
                msgspec.structs.replace(setup, cores=own, threads=threads or max(1, len(own) or cores())),
                logs / f"worker-{index}.log",
            )
            for index, own in enumerate(sets)
        ]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.stop()

    @property
    def environment(self) -> dict[str, Any]:
        """The fingerprint of the first worker that started; {} before that."""
        return next((worker.environment for worker in self.workers if worker.environment), {})

    def run(
        self,
        tasks: Iterable[Task],
        on_reply: Callable[[Task, Reply], None],
        on_death: Callable[[Task, WorkerDied], Iterable[Task]],
    ) -> None:
        """Do all tasks; replies arrive one at a time.

        `on_death(task, error)` records the loss and returns what is left to do of that task. Any exception of the
        callbacks, and RequestError of a worker, stops all and is raised here.
        """
        queue, lock, failures = deque(tasks), threading.Lock(), list[BaseException]()

        def drain(worker: Worker) -> None:
            while not failures:
                with lock:
                    if not queue:
                        return
                    task = queue.popleft()
                try:
                    for reply in worker.ask(task):
                        with lock:
                            on_reply(task, reply)
                except WorkerDied as error:
                    try:
                        with lock:
                            queue.extendleft(reversed(list(on_death(task, error))))
                    except BaseException as failure:  # raised again by the caller's thread
                        failures.append(failure)
                except BaseException as error:  # raised again by the caller's thread
                    worker.stop()  # it may be in the middle of its replies
                    failures.append(error)

        threads = [threading.Thread(target=drain, args=(worker,), daemon=True) for worker in self.workers]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # leaves the main thread open to Ctrl-C
        except BaseException as interrupt:
            failures.append(interrupt)
            raise
        if failures:
            raise failures[0]
