"""Tasks of a model: its inputs from a batch, its loss, its metric."""

from acm_compiler.tasks.base import Likeness, Task
from acm_compiler.tasks.open_task import Score, batch_for, open_task, task_for

__all__ = ["Likeness", "Score", "Task", "batch_for", "open_task", "task_for"]
