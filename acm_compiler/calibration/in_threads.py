"""Work on sites side by side: matrices of one site are too small to keep the threads of one operator busy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(function: Callable[[_Item], _Result], items: Iterable[_Item], *, workers: int) -> Iterator[_Result]:
    """Results of `function` for each of `items`, in their order, by so many workers, which share torch's threads.

    The next item is taken when a worker is free. Workers compute gradients where this thread does and see its context
    variables, but not its modes of torch. An error of one is raised here, after the results before it, once the
    others have ended what they are at.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    threads, with_gradients = torch.get_num_threads(), torch.is_grad_enabled()

    def start() -> None:
        torch.set_num_threads(max(1, threads // workers))

    def work(item: _Item) -> _Result:
        with torch.set_grad_enabled(with_gradients):
            return function(item)

    running: deque[Future[_Result]] = deque()
    try:
        with ThreadPoolExecutor(workers, "acm-sites", initializer=start) as pool:
            for item in items:
                running.append(pool.submit(copy_context().run, work, item))
                del item  # its memory goes when the worker is done with it
                if len(running) == workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
    finally:
        torch.set_num_threads(threads)  # what workers set would hold for threads that begin later
