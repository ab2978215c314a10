"""Conversion without training: learners, gates and the budget table from a few thousand unlabelled tokens."""

from acm_compiler.calibration.calibrate import calibrate, calibrate_on, check_closed_form
from acm_compiler.calibration.examples import Options
from acm_compiler.calibration.recalibrate import Sensitivity, known_damages, recalibrate, sensitivity

__all__ = [
    "Options",
    "Sensitivity",
    "calibrate",
    "calibrate_on",
    "check_closed_form",
    "known_damages",
    "recalibrate",
    "sensitivity",
]
