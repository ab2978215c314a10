"""acm_compiler: turn a trained transformer into one that serves every compute budget.

    import acm_compiler as acm

    plan = acm.plan(model, example_inputs)
    model = acm.rewrite(model, plan)
    acm.set_budget(model, 0.4)

Names are imported when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib

from acm_compiler import env as _env

TYPE_CHECKING = False  # as that of typing, whose import would take longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from acm_compiler import errors as errors
    from acm_compiler.backend.explanation import explain as explain
    from acm_compiler.calibration.calibrate import calibrate as calibrate
    from acm_compiler.calibration.quantized.quantize import quantize as quantize
    from acm_compiler.calibration.recalibrate import recalibrate as recalibrate
    from acm_compiler.calibration.recalibrate import sensitivity as sensitivity
    from acm_compiler.checkpoint.load import load as load
    from acm_compiler.checkpoint.save import save as save
    from acm_compiler.errors import AcmError as AcmError
    from acm_compiler.evaluation.evaluate import evaluate as evaluate
    from acm_compiler.exporting.export import export as export
    from acm_compiler.passes.rewrite.conversion import sites as sites
    from acm_compiler.passes.rewrite.revert import finalize as finalize
    from acm_compiler.passes.rewrite.revert import revert as revert
    from acm_compiler.passes.rewrite.rewrite import rewrite as rewrite
    from acm_compiler.planning.plan import Plan as Plan
    from acm_compiler.recipe.schema import GateConfig as GateConfig
    from acm_compiler.recipe.schema import SiteRule as SiteRule
    from acm_compiler.reporting.write import report as report
    from acm_compiler.runs.pipeline import plan as plan
    from acm_compiler.runtime.batch_context import batch as batch
    from acm_compiler.runtime.control import relax as relax
    from acm_compiler.runtime.control import set_budget as set_budget
    from acm_compiler.runtime.control import set_k as set_k
    from acm_compiler.runtime.generate import Draft as Draft
    from acm_compiler.runtime.generate import generate as generate
    from acm_compiler.runtime.meter import Meter as Meter
    from acm_compiler.runtime.meter import meter as meter
    from acm_compiler.runtime.site_status import status as status
    from acm_compiler.runtime.sparsity import measure_sparsity as measure_sparsity
    from acm_compiler.runtime.sparsity import set_sparsity as set_sparsity
    from acm_compiler.runtime.tensor_parallel import SplitLearners as SplitLearners
    from acm_compiler.runtime.usage import record as record
    from acm_compiler.training.loss_terms import losses as losses

__version__ = "0.1.0"

_HOMES = {
    "AcmError": "errors",
    "GateConfig": "recipe.schema",
    "Plan": "planning.plan",
    "SiteRule": "recipe.schema",
    "batch": "runtime.batch_context",
    "calibrate": "calibration.calibrate",
    "Draft": "runtime.generate",
    "evaluate": "evaluation.evaluate",
    "explain": "backend.explanation",
    "export": "exporting.export",
    "finalize": "passes.rewrite.revert",
    "generate": "runtime.generate",
    "load": "checkpoint.load",
    "losses": "training.loss_terms",
    "measure_sparsity": "runtime.sparsity",
    "Meter": "runtime.meter",
    "meter": "runtime.meter",
    "plan": "runs.pipeline",
    "quantize": "calibration.quantized.quantize",
    "recalibrate": "calibration.recalibrate",
    "record": "runtime.usage",
    "relax": "runtime.control",
    "report": "reporting.write",
    "revert": "passes.rewrite.revert",
    "rewrite": "passes.rewrite.rewrite",
    "save": "checkpoint.save",
    "sensitivity": "calibration.recalibrate",
    "set_budget": "runtime.control",
    "set_k": "runtime.control",
    "set_sparsity": "runtime.sparsity",
    "SplitLearners": "runtime.tensor_parallel",
    "sites": "passes.rewrite.conversion",
    "status": "runtime.site_status",
}

__all__ = list(_HOMES)


if not TYPE_CHECKING:  # else a type checker would know every name, misspelt ones too, as Any

    def __getattr__(name: str) -> Any:
        if name == "errors":
            return importlib.import_module(f"{__name__}.errors")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


if _env.logged_rooms():
    from acm_compiler.files import show_logs

    show_logs()
