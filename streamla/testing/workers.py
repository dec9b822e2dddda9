"""Run jobs in processes of their own; whichever is free takes the next."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Died:
    """In place of the result of a job whose process ended, with this exit code; -N is signal N."""

    exitcode: int | None


def run_jobs(
    jobs: Sequence[Callable[[], T]], count: int
) -> Generator[tuple[int, T | Died], None, None]:
    """The number and the result of each job, as they end. They are begun in their order.

    With a `count` of 1 they run in this process. With more they run in as many new ones, so jobs and results
    are pickled; a process that ends is replaced. Closing the generator ends the processes.
    """
    if count <= 1:
        for number, job in enumerate(jobs):
            yield number, job()
        return

    left = deque(enumerate(jobs))
    threads = max(1, torch.get_num_threads() // count)
    idle: list[_Worker] = []
    busy: dict[Any, tuple[_Worker, int]] = {}
    try:
        idle += [_Worker(threads) for _ in jobs[:count]]
        while left or busy:
            while left and idle:
                worker, (number, job) = idle.pop(), left.popleft()
                busy[worker.connection] = worker, number
                worker.begin(job)
            for connection in wait(list(busy)):
                worker, number = busy.pop(connection)
                result = worker.result()
                if isinstance(result, Died) and left:
                    worker = _Worker(threads)
                idle.append(worker)
                yield number, result
    finally:
        for worker in (*idle, *(worker for worker, _ in busy.values())):
            worker.end()


class _Worker:
    def __init__(self, threads: int) -> None:
        # A forked process could not use CUDA.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, threads), daemon=True)
        self.process.start()
        theirs.close()  # only the worker holds it: reading here ends when the worker does

    def begin(self, job: Callable[[], Any]) -> None:
        with suppress(ConnectionError):  # `result` tells that it has died
            self.connection.send(job)

    def result(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return Died(self.process.exitcode)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _work(connection: Connection, threads: int) -> None:
    # Ctrl-C reaches every process of a terminal: the one that deals out the jobs ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    with suppress(EOFError):  # the other process has ended
        while True:
            connection.send(connection.recv()())
