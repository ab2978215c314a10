"""The adaptive computation module: gate, learners, module, and the plain-torch reference that gives them meaning."""

from acm_compiler.acm import gated_learners as _registered  # noqa: F401
from acm_compiler.acm import steps as _joined  # noqa: F401
from acm_compiler.acm.gradients import operators as _differentiated  # noqa: F401
from acm_compiler.acm.learners import Gate, Learners
from acm_compiler.acm.module import ACM

__all__ = ["ACM", "Gate", "Learners"]
