"""`import acm_compiler.hf`: transformers' auto classes and `pipeline` load folders written by `acm.save`.

Where peft is installed, `target_modules` of a LoraConfig made afterwards may name sites (`adapters`).

import acm_compiler.hf
from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained("out/")     # as acm.load("out/")
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from acm_compiler.checkpoint import load
from acm_compiler.checkpoint.hf_files import MODEL_TYPE, auto_classes
from acm_compiler.errors import ModelSourceError, UsageError
from acm_compiler.recipe.models import AUTO_CLASSES

# what transformers passes along, or what says where to fetch from: nothing here depends on it
_OF_NO_EFFECT = frozenset(
    (
        *("_from_auto", "_from_pipeline", "_commit_hash", "adapter_kwargs", "cache_dir", "code_revision"),
        *("force_download", "local_files_only", "low_cpu_mem_usage", "proxies", "revision", "subfolder", "token"),
        *("trust_remote_code", "use_safetensors", "weights_only"),
    )
)


class AcmConfig(PreTrainedConfig):
    """The config.json of a saved folder: which auto class gives its model."""

    model_type = MODEL_TYPE
    auto_class: str = "AutoModel"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.architectures = [self.auto_class]  # `transformers serve` loads the class of this name


class AcmLoader:
    """Loader that the auto class named `auto_class` finds for an `AcmConfig`; gives the model as `acm.load` does."""

    config_class = AcmConfig
    auto_class: ClassVar[str]

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], *args: Any, config: Any = None, **options: Any) -> Any:
        """The model in `folder`, which transformers' `dtype`, `device_map` (one device) and `attn_implementation` fit.

        AutoModel gives the body of a model with a head, whose sites keep their names. ModelSourceError for a folder
        that is not on this machine or holds a model of another auto class.
        """
        if not Path(folder).is_dir():
            raise ModelSourceError(
                "no such folder on this machine", where=str(folder), fix="download the repository, then give its folder"
            )
        return _fitted(cls._of_class(load(folder), folder), options | _changed(config, folder))

    @classmethod
    def _from_config(cls, config: Any, **options: Any) -> Any:
        raise UsageError(
            "an ACM model is more than its config", fix=f"{cls.auto_class}.from_pretrained(folder), or acm.load(folder)"
        )

    @classmethod
    def _of_class(cls, model: Any, folder: str | os.PathLike[str]) -> Any:
        """The model, or its body where that is what this auto class builds."""
        for part in (model, model.base_model):
            if cls.auto_class in auto_classes(part):
                return part
        raise ModelSourceError(
            f"{cls.auto_class} builds no {type(model).__name__}, which was saved",
            where=str(folder),
            expected=", ".join(auto_classes(model)),
        )


def _changed(config: Any, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Values of the config, such as `num_labels`, that `from_pretrained` was asked to change."""
    if config is None:
        return {}
    saved, asked = AcmConfig.from_pretrained(folder).to_dict(), config.to_dict()
    changed = {key: value for key, value in asked.items() if not key.startswith("_") and value != saved.get(key)}
    # transformers keeps this one apart, and no longer passes it on once the config has it
    return changed | {"attn_implementation": config._attn_implementation}


def _fitted(model: Any, options: dict[str, Any]) -> Any:
    """`model` with what `from_pretrained` was asked for; UsageError for what cannot be done afterwards."""
    asked = {key: value for key, value in options.items() if key not in _OF_NO_EFFECT and value is not None}
    dtype = asked.pop("dtype", asked.pop("torch_dtype", "auto"))
    device, attention = asked.pop("device_map", None), asked.pop("attn_implementation", None)
    info = asked.pop("output_loading_info", False)
    if asked:
        raise UsageError(
            "an ACM model is loaded as it was saved", found=", ".join(map(str, asked)), fix="set that on the model"
        )
    if dtype != "auto":
        model = model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    if device is not None:
        model = model.to(_one_device(device))
    if attention is not None:
        model.set_attn_implementation(attention)
    if not info:
        return model
    return model, {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}


def _one_device(device: Any) -> Any:
    devices = set(device.values()) if isinstance(device, dict) else {device}
    if devices & {"auto", "balanced", "balanced_low_0", "sequential"} and not torch.accelerator.is_available():
        return "cpu"
    if len(devices) == 1 and not devices & {"balanced", "balanced_low_0", "sequential", "disk"}:
        (only,) = devices
        return torch.accelerator.current_accelerator() if only == "auto" else only
    raise UsageError("an ACM model is put on one device", found=device, fix='device_map="cuda:0", or model.to(device)')


AutoConfig.register(MODEL_TYPE, AcmConfig, exist_ok=True)
for _name in AUTO_CLASSES:
    _loader: Any = type(f"{_name}Acm", (AcmLoader,), {"auto_class": _name, "__module__": __name__})
    getattr(transformers, _name).register(AcmConfig, _loader, exist_ok=True)
if find_spec("peft") is not None:
    from acm_compiler.hf import adapters

    adapters.register()
