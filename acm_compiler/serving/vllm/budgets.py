"""Budgets of a served model's requests: what the folder says, and each token's setting in the batch that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from acm_compiler.checkpoint.documents import restore_document
from acm_compiler.checkpoint.load import read_folder
from acm_compiler.errors import UsageError, require_fitted
from acm_compiler.passes.rewrite.conversion import Conversion
from acm_compiler.runtime.budgets import Setting, setting_of
from acm_compiler.runtime.control import PHASES

OWN = "acm_budget"
_NAMES = ("budget", "prefill_budget", "thinking_budget", "thinking_end")
_BY_PHASE = ({*PHASES}, {*PHASES, "thinking", "thinking_end"})
_NEVER = torch.iinfo(torch.int64).max
# the way out of a choice that no budget gives
SET_ONE = "acm.set_budget(model, 0.5), then save it; or --additional-config '{\"acm_budget\": 0.5}'"


class Settings(NamedTuple):
    """The settings of the gates in the phases of a request.

    thinking: of what is written before the token `thinking_end`, where that differs from `decode`.
    """

    prefill: Setting
    decode: Setting
    thinking: Setting | None = None
    thinking_end: int | None = None

    @property
    def phases(self) -> tuple[Setting, Setting, Setting]:
        """The settings of the prompt, of what is written first, and of what is written then."""
        return self.prefill, self.decode if self.thinking is None else self.thinking, self.decode

    @property
    def by_phase(self) -> bool:
        """True if not all tokens of a request run at one budget."""
        return len(set(self.phases)) > 1


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
    def of_engine(cls, vllm_config: Any) -> SavedBudgets:
        """The budgets of the folder that an engine of vLLM serves."""
        return cls.read(vllm_config.model_config.model, vllm_config.additional_config)

    @classmethod
    def read(cls, folder: str, options: Any = None) -> SavedBudgets:
        """The budgets in `folder`; those of vLLM's --additional-config, under `acm_budget`, come before what was saved.

        StorageError as `acm.load`, SitesNotFitted where sites have no learners yet, BudgetUnreachable, UsageError for a
        fixed k and for quantised layers outside of ACMs.
        """
        _, plan, budgets = read_folder(folder)
        require_fitted([site.name for site in plan.sites if site.state == "dense"], "vLLM", where=folder)
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
        """The settings that a request asks for by the names of `asked_by`. BudgetUnreachable, UsageError."""
        budget, prefill, thinking, end = (options.get(name) for name in _NAMES)
        found = self.own if budget is None else _settings(self.owner, budget)
        if prefill is not None:
            found = found._replace(prefill=setting_of(self.owner, prefill))
        return found if thinking is None and end is None else _thinking(self.owner, found, thinking, end)


def _settings(owner: Conversion, budget: Any) -> Settings:
    """Settings for one budget, or for one in each phase."""
    if not isinstance(budget, Mapping):
        return Settings(setting := setting_of(owner, budget), setting)
    if set(budget) not in _BY_PHASE:
        raise UsageError(
            "budgets by phase must be prefill and decode, or thinking and thinking_end too", found=sorted(budget)
        )
    prefill, decode = (setting_of(owner, budget[phase]) for phase in PHASES)
    found = Settings(prefill, decode)
    return _thinking(owner, found, budget["thinking"], budget["thinking_end"]) if "thinking" in budget else found


def _thinking(owner: Conversion, found: Settings, budget: Any, end: Any) -> Settings:
    """The settings `found`, with another budget for what is written before the token `end`."""
    if budget is None or end is None:
        raise UsageError(
            "a budget for thinking needs the id of the token that ends it, and the other way round",
            found={"thinking_budget": budget, "thinking_end": end},
            fix="give thinking_budget and thinking_end, or neither",
        )
    if type(end) is not int or end < 0:
        raise UsageError("thinking_end must be the id of a token", found=repr(end))
    return found._replace(thinking=setting_of(owner, budget), thinking_end=end)


def asked_by(sampling_params: Any) -> dict[str, Any]:
    """The budgets among a request's extra arguments, by name."""
    extra = sampling_params.extra_args or {}
    return {name: extra[name] for name in _NAMES if extra.get(name) is not None}


@dataclass(slots=True)
class Row:
    """A request in the batch: how many tokens its prompt has, its settings, and where its answer begins, once known."""

    prompt: int
    settings: Settings
    answer: int = _NEVER

    def find_answer(self, ids: Tensor | list[int], first: int | Tensor) -> None:
        """Look for the end of thinking among the tokens `ids`, which are at `first` of the request and behind it."""
        if self.settings.thinking_end is None or self.answer != _NEVER:
            return
        start = max(self.prompt - int(first), 0)  # a prompt's own do not count
        (places,) = (torch.as_tensor(ids[start:]) == self.settings.thinking_end).nonzero(as_tuple=True)
        if places.numel():
            self.answer = int(first) + start + int(places[0])


class TokenSettings:
    """Each token's knob and lowest k in the forward that comes next, [tokens], which all ACMs of the model read.

    rows: the requests in the batch, by their place in it. The tensors are written in place, so graphs follow them.
    """

    def __init__(self, own: Settings, *, tokens: int, device: torch.device) -> None:
        self.own, self.rows = own, dict[int, Row]()
        self.knob = torch.full((tokens,), own.prefill.knob, dtype=torch.float32, device=device)
        self.k_lo = torch.full((tokens,), own.prefill.k_lo, dtype=torch.int32, device=device)
        self._is_own = True  # the tensors hold the settings of the server's own budget

    def write(self, ids_T: Tensor, positions_T: Tensor, starts: list[int]) -> None:
        """Write the settings of tokens at `positions_T` of their requests; row i has tokens starts[i] to starts[i + 1].

        A token is of the prompt by its position, however the prompt is cut into batches, and when it is run again. The
        one that ends thinking is the first of the answer.
        """
        rows = [self.rows[i] for i in range(len(starts) - 1)] if self.rows else []
        if all(row.settings == self.own for row in rows) and not self.own.by_phase:
            if not self._is_own:
                self.knob.fill_(self.own.prefill.knob)
                self.k_lo.fill_(self.own.prefill.k_lo)
            self._is_own = True
            return
        for row, (begin, end) in zip(rows, pairwise(starts), strict=True):
            row.find_answer(ids_T[begin:end], positions_T[begin])
        counts = torch.tensor(starts).diff()
        of_token_T = torch.repeat_interleave(torch.arange(len(rows)), counts)
        tokens = of_token_T.shape[0]
        bounds = torch.tensor([[row.prompt, row.answer] for row in rows])
        phases_T = (positions_T[:tokens, None].cpu() >= bounds[of_token_T]).sum(1)
        for target, name in ((self.knob, "knob"), (self.k_lo, "k_lo")):
            values = torch.tensor([[getattr(s, name) for s in row.settings.phases] for row in rows], dtype=target.dtype)
            target[:tokens].copy_(values[of_token_T, phases_T])
        self._is_own = False


_OF_ENGINES: WeakValueDictionary[str, TokenSettings] = WeakValueDictionary()


def token_settings(vllm_config: Any) -> TokenSettings:
    """The settings that the model and the processor of one engine share; made by the first of them."""
    found = _OF_ENGINES.get(vllm_config.instance_id)
    if found is None:
        saved = SavedBudgets.of_engine(vllm_config)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        most = max(tokens, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
        found = TokenSettings(saved.own, tokens=most, device=torch.device(vllm_config.device_config.device))
        _OF_ENGINES[vllm_config.instance_id] = found
    return found
