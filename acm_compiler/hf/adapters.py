"""LoRA (peft) on the learners of an ACM: `target_modules` may name sites, as it names linears.

A site's adapter is two thin matrices for each of its weights, of the shape that the dense layer's would have: the
learners are slices of one layer, so that one update of it serves every k and merges into all of them.
"""

from __future__ import annotations

import math
from functools import wraps
from typing import Any, NoReturn

import peft
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from acm_compiler.acm import ACM
from acm_compiler.acm.arguments import Weights
from acm_compiler.errors import PackageMissing, TrainingFailed, UsageError

_WEIGHTS = ("w_in", "w_up", "w_out", "w_top")
# of a LoraConfig: what an update of weights cannot do, or needs one weight for; and its value where it is off
_OFF: dict[str, object] = {"lora_dropout": 0.0, "lora_bias": False, "bias": "none", "use_dora": False}
_OFF |= {"fan_in_fan_out": False, "layer_replication": None}


class AdaptedACM(nn.Module, LoraLayer):
    """An ACM with LoRA adapters on its learners, as peft puts it in the ACM's place; calls and outputs as the ACM's.

    lora_A and lora_B hold, by adapter, an nn.Linear for each weight of the learners: [D, r] and [r, rows], where the
    weight seen as the dense layer's is [rows, D]. Every call adds their products to the weights, which takes time:
    merge them where it counts. Gates are not adapted.
    Raises UsageError for learners that are not fitted or quantised, and for options that no update of weights has.
    """

    def __init__(
        self,
        base_layer: ACM,
        adapter_name: str,
        config: LoraConfig | None = None,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        # 0.20 gives a model that loads saved adapters other outputs
        if config is None or TorchVersion(peft.__version__) < "0.21":
            fix = "pip install 'acm_compiler[lora]'"
            raise PackageMissing("LoRA on ACMs needs peft 0.21 or later", found=f"peft {peft.__version__}", fix=fix)
        LoraLayer.__init__(self, base_layer, **kwargs)
        _refuse_site(base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)
        base_layer.adapter = self.adapted

    @property
    def _acm(self) -> ACM:
        acm = self.get_base_layer()
        assert isinstance(acm, ACM)
        return acm

    def __getattr__(self, name: str) -> Any:
        """Look up on the ACM what is not found here, such as a weight's stand-in."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":
                raise
            return getattr(self.base_layer, name)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, ACM)
        return module.d_in, module.learners.b_out.shape[-1]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **_: Any) -> None:
        """Add an adapter of rank `r`: its product starts at zero, or at random for `init_lora_weights=False`."""
        acm = self._acm
        _refuse_options(acm, r, config)
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        first, second = nn.ModuleDict(), nn.ModuleDict()
        for name, weight in _weights_of(acm.learners.weights()).items():
            rows, columns = _dense_shape(name, weight, acm.learners.form)
            down = nn.Linear(columns, r, bias=False, device=weight.device, dtype=weight.dtype)
            up = nn.Linear(r, rows, bias=False, device=weight.device, dtype=weight.dtype)
            if config.init_lora_weights == "gaussian":
                nn.init.normal_(down.weight, std=1 / r)
            if config.init_lora_weights:
                nn.init.zeros_(up.weight)
            first[name], second[name] = down, up
        self.lora_A[adapter_name], self.lora_B[adapter_name] = first, second
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the ACM with the weights that `adapted` gives."""
        self._check_forward_args(x, *args, **kwargs)
        if kwargs.pop("adapter_names", None) is not None:
            raise UsageError(
                "all examples of a batch run the same adapters here",
                where=self._acm.name,
                fix="call the model once for each adapter, after set_adapter(name)",
            )
        return self.base_layer(x, *args, **kwargs)

    def adapted(self, weights: Weights) -> Weights:
        """The learners' weights with the updates of all active adapters that are not merged."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged:
            return weights
        found = {
            name: weight + sum(updates)
            for name, weight in _weights_of(weights).items()
            if (updates := [self._update(a, name, weight) for a in self.active_adapters if a in self.lora_A])
        }
        return Weights(*weights.tensors._replace(**found), act=weights.act, form=weights.form)

    def get_delta_weight(self, adapter: str) -> dict[str, Tensor]:
        """The adapter's update of each weight, by the weight's name, in the weight's shape."""
        weights = _weights_of(self._acm.learners.weights())
        return {name: self._update(adapter, name, weight).expand_as(weight) for name, weight in weights.items()}

    def _update(self, adapter: str, name: str, weight: Tensor) -> Tensor:
        factors = [self.get_parameter(f"lora_{which}.{adapter}.{name}.weight") for which in "BA"]
        update = self.scaling[adapter] * (factors[0] @ factors[1])
        return _as_learners(update, name, weight, self._acm.learners.form).to(weight.dtype)

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters' updates to the learners, in place; with `safe_merge` only if the sums are finite."""
        for adapter in check_adapters_to_merge(self, adapter_names):
            if adapter not in self.lora_A:
                continue
            self._add(adapter, 1, safe=safe_merge)
            self.merged_adapters.append(adapter)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take the merged adapters' updates out again, to rounding."""
        while self.merged_adapters:
            self._add(self.merged_adapters.pop(), -1)

    def _add(self, adapter: str, sign: int, *, safe: bool = False) -> None:
        acm = self._acm
        sums = {name: getattr(acm.learners, name) + sign * d for name, d in self.get_delta_weight(adapter).items()}
        for name, total in sums.items():
            if safe and not total.isfinite().all():
                raise TrainingFailed(
                    f"adapter {adapter} gives weights that are not finite",
                    where=f"{acm.name}.learners.{name}",
                    fix="merge another adapter, or train this one anew with a lower learning rate",
                )
        for name, total in sums.items():
            getattr(acm.learners, name).copy_(total)

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """The ACM without adapters, for peft's `unload` and `merge_and_unload`."""
        if merge:
            self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        self._acm.adapter = None
        return self._acm

    def __repr__(self) -> str:
        return f"lora.{super().__repr__()}"


def _weights_of(weights: Weights) -> dict[str, Tensor]:
    tensors = weights.tensors._asdict()
    return {name: tensors[name] for name in _WEIGHTS if tensors[name] is not None}


def _dense_shape(name: str, weight: Tensor, form: str) -> tuple[int, int]:
    """Rows and columns of a weight of the learners where it is seen as a layer's."""
    if name == "w_in" and form == "cols":
        return weight.shape[1], weight[:, 0].numel()
    if name == "w_out":
        return weight.shape[-3], weight.shape[-2] * weight.shape[-1]
    return weight.numel() // weight.shape[-1], weight.shape[-1]


def _as_learners(update: Tensor, name: str, weight: Tensor, form: str) -> Tensor:
    """An update of the layer [rows, columns] as one of the learners' weight; second layers of all k share it."""
    if name == "w_in" and form == "cols":
        learners, _, heads, width = weight.shape
        return update.unflatten(1, (heads, learners, width)).permute(2, 0, 1, 3)
    if name == "w_out":
        return update.unflatten(1, weight.shape[-2:])
    return update.view(weight.shape)


def _refuse_site(acm: ACM) -> None:
    if acm.state == "dense":
        raise UsageError(
            "the learners of this site were never fitted, so that adapters on them would not run",
            where=acm.name,
            fix="acm.calibrate(model, batches) first",
        )
    if (kind := acm.learners.quantized) is not None:
        fix = "adapt the model before it is quantised"
        raise UsageError("quantised learners take no adapters", where=acm.name, found=kind, fix=fix)


def _refuse_options(acm: ACM, r: int, config: LoraConfig) -> None:
    def refuse(option: str, found: object, expected: str) -> NoReturn:
        raise UsageError(f"{option} does not work on an ACM", where=acm.name, found=str(found), expected=expected)

    if r < 1:
        refuse("this rank", r, "r >= 1")
    for option, off in _OFF.items():
        if (found := getattr(config, option, off)) != off:
            refuse(option, found, f"{option}={off}")
    if config.init_lora_weights not in (True, False, "gaussian"):
        refuse("init_lora_weights", config.init_lora_weights, "True, False or 'gaussian'")


def register() -> None:
    """Let each LoraConfig that is made from now on name sites in `target_modules`."""
    plain = LoraConfig.__post_init__

    @wraps(plain)
    def with_sites(config: LoraConfig) -> None:
        plain(config)
        config._register_custom_module({ACM: AdaptedACM})

    LoraConfig.__post_init__ = with_sites  # type: ignore[method-assign]
