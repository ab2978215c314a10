"""Further files of a saved transformers model, so that transformers loads it as what it is or not at all.

`AutoModel.from_pretrained(folder)` gives the ACM model after `import acm_compiler.hf`. Without this
package the folder's `model_type` is unknown to the auto classes, and a concrete class such as BertModel stops at
`transformers_weights`, which names no file: missing weights alone would only be warned about, and drawn at random.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from torch import nn

from acm_compiler.errors import StorageError
from acm_compiler.recipe.models import AUTO_CLASSES
from acm_compiler.sources.from_hf import classes_of

MODEL_TYPE = "acm_compiler"
CONFIG, GENERATION, README = "config.json", "generation_config.json", "README.md"
_NEEDS = "this folder holds ACMs: pip install acm_compiler, then import acm_compiler.hf and load it by an auto class"
_TEXT = """\
# {cls} with Adaptive Computation Modules

This model was converted by acm_compiler: each token runs as many learners as it needs, and one model serves every
budget. It loads with that package only:

```python
import acm_compiler as acm

model = acm.load("this/folder")
acm.set_budget(model, 0.5)
```

or by transformers' own calls, once they have been told:

```python
import acm_compiler.hf
from transformers import {auto_class}

model = {auto_class}.from_pretrained("this/folder")
```

`pipeline(task, model="this/folder")` works alike where the folder also holds what prepares the inputs, a tokenizer or a
processor of images or audio: `processor.save_pretrained("this/folder")`.
"""


def is_pretrained(model: nn.Module) -> bool:
    """True if `model` is one of transformers' own."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def auto_classes(model: Any) -> list[str]:
    """transformers' auto classes that build models of this very class."""
    return [name for name in AUTO_CLASSES if type(model) in classes_of(name, model.config)]


def hf_files(model: nn.Module, source: dict[str, Any] | None) -> dict[str, str]:
    """The further files of a saved `model` by name; none unless transformers can build it from `source`."""
    if not is_pretrained(model) or source is None or source.get("source") != "hf":
        return {}
    auto_class = source.get("auto_class") or "AutoModel"
    name = type(model).__name__
    config = {
        "model_type": MODEL_TYPE,
        "architectures": [f"Acm{name}"],
        "auto_class": auto_class,
        "transformers_weights": _NEEDS,
    }
    texts = {
        CONFIG: json.dumps(config, indent=1),
        README: _TEXT.format(cls=type(model).__name__, auto_class=auto_class),
    }
    generation: Any = getattr(model, "generation_config", None)
    return texts if generation is None else texts | {GENERATION: generation.to_json_string()}


def restore_generation(model: nn.Module, folder: Path) -> None:
    """Give `model` the settings of `generate` that were saved with it; StorageError where they cannot be read."""
    if not is_pretrained(model) or not (folder / GENERATION).is_file():
        return
    from transformers import GenerationConfig

    try:
        saved: Any = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        fix = "copy the file again from where it is whole, or save the model again"
        where, found = str(folder / GENERATION), str(error).splitlines()[0]
        raise StorageError("the settings of generate cannot be read", where=where, found=found, fix=fix) from error
    model.generation_config = saved
