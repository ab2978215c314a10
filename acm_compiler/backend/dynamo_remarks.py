"""What Dynamo says of libraries' code while it traces a model, which is no matter of the user's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# transformers asks a cached function of its own whether modules are sharded
_OF_CACHES = "Dynamo detected a call to a `functools.lru_cache`"


@contextmanager
def without_remarks() -> Iterator[None]:
    """Leave out what Dynamo warns of in code that is not the user's; nothing else."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _OF_CACHES, UserWarning)
        yield
