"""What a model is for: its inputs from a batch, its loss, its metric."""

from acm_compiler.tasks.base import Likeness, Metric, Task, judged_by
from acm_compiler.tasks.open_task import open_task
from acm_compiler.tasks.own_metric import Score, task_for

__all__ = ["Likeness", "Metric", "Score", "Task", "judged_by", "open_task", "task_for"]
