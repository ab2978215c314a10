"""Sources of models: references such as `torchvision:vit_b_16`, and the models built from them.

`parse_reference` reads one, `build` makes the model, `build_from_record` makes it again for a saved directory.
"""

from acm_compiler.sources.build import BuiltModel, build, build_from_record, parse_reference, show_reference
from acm_compiler.sources.examples import InputSpec, parse_input

__all__ = [
    "BuiltModel",
    "InputSpec",
    "build",
    "build_from_record",
    "parse_input",
    "parse_reference",
    "show_reference",
]
