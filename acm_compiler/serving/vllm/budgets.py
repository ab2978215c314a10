"""Budgets of a served model's requests: what the folder says, and each token's setting in the batch that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from acm_compiler.checkpoint.documents import restore_document
from acm_compiler.checkpoint.load import read_folder
from acm_compiler.errors import SitesNotFitted, UsageError
from acm_compiler.passes.rewrite.conversion import Conversion
from acm_compiler.runtime.budgets import Setting, setting_of
from acm_compiler.runtime.control import PHASES

OWN = "acm_budget"
_NAMES = ("budget", "prefill_budget")
# the way out of a choice that no budget gives
SET_ONE = "acm.set_budget(model, 0.5), then save it; or --additional-config '{\"acm_budget\": 0.5}'"


class Settings(NamedTuple):
    """The settings of the gates in both phases of a request."""

    prefill: Setting
    decode: Setting

    @property
    def by_phase(self) -> bool:
        """True if a prompt runs at another budget than what is written behind it."""
        return self.prefill != self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBudgets:
    """Budgets of a saved folder, as far as a server needs them: its table, and what runs where a request says nothing.

    rules: the meaning of each site's scores. choices: what was set at each site when it was saved, by phase.
    """

    owner: Conversion
    own: Settings
    rules: Mapping[str, Any]
    choices: Mapping[str, Mapping[str, tuple[float, int, int]]] | None

    @classmethod
    def read(cls, folder: str, options: Any = None) -> SavedBudgets:
        """The budgets in `folder`; those of vLLM's --additional-config, under `acm_budget`, come before what was saved.

        StorageError as `acm.load`, SitesNotFitted where sites have no learners yet, BudgetUnreachable, UsageError for a
        fixed k and for quantised layers outside of ACMs.
        """
        _, plan, budgets = read_folder(folder)
        if unfitted := [site.name for site in plan.sites if site.state == "dense"]:
            raise SitesNotFitted(
                "learners were never fitted here", where=unfitted[0], fix="acm.calibrate(model, batches), then save it"
            )
        owner = Conversion(plan=plan)
        restore_document(owner, {}, budgets)
        if owner.rest:
            raise UsageError(
                "vLLM cannot run the quantised layers around these ACMs",
                where=folder,
                found=owner.rest[0],
                fix="acm.quantize(model) without rest=True, then save it",
            )
        choices = budgets.get("choices")
        asked = options.get(OWN) if isinstance(options, Mapping) else None
        if asked is None:
            asked = budgets.get("phase_budgets") or (owner.default_budget if choices is None else choices["budget"])
            if asked is None and choices is not None:
                raise UsageError("this folder was saved with a fixed k", where=folder, fix=SET_ONE)
        owner.cap = None if choices is None else choices["cap"]
        own = _settings(owner, 1.0 if asked is None else asked)
        kept = choices["sites"] if choices is not None and asked == choices["budget"] else None
        return cls(owner=owner, own=own, rules=budgets["rules"], choices=kept)

    def of_request(self, options: Mapping[str, Any]) -> Settings:
        """The settings that a request's `budget` and `prefill_budget` ask for. BudgetUnreachable, UsageError."""
        budget, prefill = options.get("budget"), options.get("prefill_budget")
        both = self.own if budget is None else _settings(self.owner, budget)
        return both if prefill is None else both._replace(prefill=setting_of(self.owner, prefill))


def _settings(owner: Conversion, budget: Any) -> Settings:
    """Settings for one budget, or for one in each phase."""
    if not isinstance(budget, Mapping):
        return Settings(setting := setting_of(owner, budget), setting)
    if set(budget) != set(PHASES):
        raise UsageError("budgets by phase", found=sorted(budget), expected="prefill and decode")
    return Settings(*(setting_of(owner, budget[phase]) for phase in PHASES))


def asked_by(sampling_params: Any) -> dict[str, Any]:
    """The budgets among a request's extra arguments, by name."""
    extra = sampling_params.extra_args or {}
    return {name: extra[name] for name in _NAMES if extra.get(name) is not None}


class Row(NamedTuple):
    """A request in the batch: how many tokens its prompt has, and its settings."""

    prompt: int
    settings: Settings


class TokenSettings:
    """Each token's knob and lowest k in the forward that comes next, [tokens], which all ACMs of the model read.

    rows: the requests in the batch, by their place in it. The tensors are written in place, so graphs follow them.
    """

    def __init__(self, own: Settings, *, tokens: int, device: torch.device) -> None:
        self.own, self.rows = own, dict[int, Row]()
        self.knob = torch.full((tokens,), own.prefill.knob, dtype=torch.float32, device=device)
        self.k_lo = torch.full((tokens,), own.prefill.k_lo, dtype=torch.int32, device=device)
        self._is_own = True  # the tensors hold the settings of the server's own budget

    def write(self, positions_T: Tensor, starts: list[int]) -> None:
        """Write the settings of tokens at `positions_T` of their requests; row i has tokens starts[i] to starts[i + 1].

        A token is of the prompt by its position, however the prompt is cut into batches, and when it is run again.
        """
        rows = [self.rows[i] for i in range(len(starts) - 1)] if self.rows else []
        if all(row.settings == self.own for row in rows) and not self.own.by_phase:
            if not self._is_own:
                self.knob.fill_(self.own.prefill.knob)
                self.k_lo.fill_(self.own.prefill.k_lo)
            self._is_own = True
            return
        counts = torch.tensor(starts).diff()
        of_token_T = torch.repeat_interleave(torch.arange(len(rows)), counts)
        tokens = of_token_T.shape[0]
        prompts = torch.tensor([row.prompt for row in rows])
        decodes_T = (positions_T[:tokens].cpu() >= prompts[of_token_T]).long()
        for target, name in ((self.knob, "knob"), (self.k_lo, "k_lo")):
            values = torch.tensor([[getattr(s, name) for s in row.settings] for row in rows], dtype=target.dtype)
            target[:tokens].copy_(values[of_token_T, decodes_T])
        self._is_own = False


_OF_ENGINES: WeakValueDictionary[str, TokenSettings] = WeakValueDictionary()


def token_settings(vllm_config: Any) -> TokenSettings:
    """The settings that the model and the processor of one engine share; made by the first of them."""
    found = _OF_ENGINES.get(vllm_config.instance_id)
    if found is None:
        saved = SavedBudgets.read(vllm_config.model_config.model, vllm_config.additional_config)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        most = max(tokens, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
        found = TokenSettings(saved.own, tokens=most, device=torch.device(vllm_config.device_config.device))
        _OF_ENGINES[vllm_config.instance_id] = found
    return found
