"""Prefix caching with budgets in requests: keys and values are found again at the budget that they were computed at."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from acm_compiler.serving.vllm.budgets import SavedBudgets, asked_by


class _Salted:
    """Part of a scheduler: the name under which a request's blocks are cached has its budget in it.

    Without one of its own a request shares what was cached without. Requests whose prompt runs at another budget than
    what they write share with nobody: their text, taken for a prompt's later, would not be the prompt's.
    """

    saved: SavedBudgets

    def __init__(self, *, vllm_config: Any, **options: Any) -> None:
        super().__init__(vllm_config=vllm_config, **options)  # type: ignore[call-arg]  # of the other base
        self.saved = SavedBudgets.of_engine(vllm_config)

    def add_request(self, request: Any) -> None:
        settings = self.saved.of_request(asked_by(request.sampling_params))
        if settings.by_phase or settings != self.saved.own:
            own = request.request_id if settings.by_phase else repr(settings.decode)
            request.cache_salt = f"{request.cache_salt or ''}|{own}"
            request.block_hashes.clear()
            request.update_block_hashes()
        super().add_request(request)  # type: ignore[misc]


class SaltedScheduler(_Salted, Scheduler):
    """vLLM's scheduler, with caches by budget."""


class SaltedAsyncScheduler(_Salted, AsyncScheduler):
    """vLLM's scheduler of steps that overlap, with caches by budget."""


def make_scheduler(*, vllm_config: Any, **options: Any) -> Any:
    """The scheduler that vLLM would make with these settings, with caches by budget."""
    kind = SaltedAsyncScheduler if vllm_config.scheduler_config.async_scheduling else SaltedScheduler
    return kind(vllm_config=vllm_config, **options)
