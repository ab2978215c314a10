"""`acm.generate`: text drafted at a low budget and checked by the same model at its own, in one cache.

Speculative decoding (Leviathan et al. 2023, arXiv 2211.17192) where the draft model is the model itself. The loop that
checks drafts is transformers' assisted generation.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm.context import called
from acm_compiler.acm.intact import refuse_skips
from acm_compiler.errors import UsageError
from acm_compiler.passes.rewrite.conversion import conversion, refuse_no_module, sites
from acm_compiler.runtime.batch_context import batch
from acm_compiler.runtime.budgets import is_number

_log = logging.getLogger(__name__)
# transformers' method that chooses who drafts, and the option that makes it ask without a second model
_HOOK, _TRIGGER = "_get_candidate_generator", "prompt_lookup_num_tokens"
_OTHER_DRAFTERS = ("assistant_model", "assistant_early_exit", "custom_generate", _TRIGGER)
# values that drafts need of other options
_REQUIRED = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}


@dataclass(slots=True, kw_only=True)
class Draft:
    """Choices for drafted tokens, and afterwards counts of them.

    budget: as for `acm.set_budget`. tokens: the most that are drafted before the model checks them; a draft ends
    earlier after a token that has less than the probability `confidence`. Over all calls that were given this object,
    `rounds` counts drafts, `drafted` their tokens, and `accepted` those that the model kept.
    """

    budget: float | str
    tokens: int = 4
    confidence: float = 0.4
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise UsageError("tokens of a draft must be 1 or more", found=repr(self.tokens), expected="such as 4")
        if not (is_number(self.confidence) and 0 <= self.confidence <= 1):
            raise UsageError("confidence must be a probability", found=repr(self.confidence), expected="0 to 1")


def generate(model: nn.Module, inputs: Tensor | None = None, *, draft: float | str | Draft, **options: Any) -> Any:
    """Generate as `model.generate(inputs, **options)` does at the model's budget, with drafts at a lower one.

    The result is that of `model.generate`: greedy, the same tokens (but for ties within rounding, as several tokens are
    checked in one call); sampled, the same distribution. Drafts use the model's own cache, so that the prompt is read
    once. draft: a budget, or a `Draft` for more choices and for its counts. Writes one sequence at a time.
    Raises what `acm.batch` with budgets does, which drafts open, and UsageError for a model that does not generate, for
    several sequences, and for options that leave no room for drafts, such as beams.
    """
    chosen = draft if isinstance(draft, Draft) else Draft(budget=draft)
    refuse_no_module(model)
    model = getattr(model, "_orig_mod", model)  # as a compiled model's own generate, whose forward is the eager one
    _refuse_unfit(model, inputs, options)
    refuse_skips(sites(model), "acm.generate")  # a call that checks one token would skip, too
    with batch(model, budgets=[chosen.budget]):
        pass  # refused before the prompt is read
    drafted, accepted = chosen.drafted, chosen.accepted
    drafting = copy.copy(model)  # shares modules and hooks; other callers of the model do not draft
    checks = _Checks()
    setattr(drafting, _HOOK, functools.partial(_SelfDraft, model, chosen, checks))
    if isinstance(budgets := conversion(model).budget, dict):
        drafting.forward = _with_checks_at(budgets["decode"], model, checks)
    written = drafting.generate(inputs, **_with_trigger(options, chosen.tokens))  # type: ignore[operator]
    drafted, accepted = chosen.drafted - drafted, chosen.accepted - accepted
    _log.info("generate: %d of %d tokens drafted at budget %s were accepted", accepted, drafted, chosen.budget)
    return written


def _with_trigger(options: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The options with the one that makes transformers ask for drafts, in the generation config where that is given."""
    config = copy.copy(options.get("generation_config"))
    if config is None:
        return options | {_TRIGGER: tokens}
    setattr(config, _TRIGGER, tokens)
    return options | {"generation_config": config}


def _refuse_unfit(model: nn.Module, inputs: Any, options: dict[str, Any]) -> None:
    generates = any(base.__name__ == "GenerationMixin" for base in type(model).__mro__)
    if not (generates and hasattr(model, _HOOK)):
        raise UsageError(
            "the model must be one that transformers' generate writes with",
            found=type(model).__name__,
            expected="such as a LlamaForCausalLM that acm.rewrite gave",
            fix="of a model in a wrapper of another library, name the model itself",
        )
    config = options.get("generation_config")
    chosen = {name: options.get(name, getattr(config, name, None)) for name in (*_OTHER_DRAFTERS, *_REQUIRED)}
    for name, value in chosen.items():
        if value not in (None, _REQUIRED.get(name)):
            raise UsageError(
                f"{name} leaves no room for drafts",
                found=f"{name}={value!r}",
                fix="leave it out, or call model.generate",
            )
    first = next((options[name] for name in ("input_ids", "inputs", "inputs_embeds") if name in options), inputs)
    if first is not None and not (isinstance(first, Tensor) and first.dim() > 1 and len(first) == 1):
        found = f"shape {tuple(first.shape)}" if isinstance(first, Tensor) else type(first).__name__
        raise UsageError(
            "drafts must be for one sequence",
            found=found,
            expected="a tensor [1, tokens]",
            fix="call acm.generate for each of several; of what a tokenizer gives: acm.generate(model, **inputs, …)",
        )


@dataclass(slots=True)
class _Checks:
    """Mark, by `is_next`, that the next call of the model checks drafted tokens."""

    is_next: bool = False


def _with_checks_at(budget: float, model: nn.Module, checks: _Checks) -> Callable[..., Any]:
    """The model's forward, at that budget where it checks a draft: several tokens, but each of them is decoded."""

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with batch(model, budgets=[budget]) if checks.is_next else nullcontext():
            return model.forward(*args, **kwargs)

    return forward


def _one() -> int:
    return 1


class _SelfDraft:
    """Drafts tokens by the model itself; what transformers calls a candidate generator."""

    requires_model_outputs = False

    def __init__(self, model: nn.Module, draft: Draft, checks: _Checks, **given: Any) -> None:
        kwargs, config = given["model_kwargs"], given["generation_config"]
        self.model, self.draft, self.checks = model, draft, checks
        self.processors = given["logits_processor"] or ()
        self.sampled, self.longest = config.do_sample, config.max_length
        self.encoded = kwargs.get("encoder_outputs")
        self.cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        if kwargs.get(self.cache_name) is None:  # earlier releases of transformers leave it to the model to make one
            kwargs[self.cache_name] = _empty_cache(cross_attention=self.encoded is not None)
        self.cache = kwargs[self.cache_name]
        self.mask = kwargs.get("attention_mask")
        self.has_read = False

    def get_candidates(self, input_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """`input_ids` [1, tokens] with drafted ones behind them, and these tokens' logits [1, drafted, vocabulary]."""
        ids = input_ids
        logits: list[Tensor] = []
        # nothing is drafted before the model has read the prompt, and the model itself writes the last token
        room = min(self.draft.tokens, self.longest - input_ids.shape[1] - 1) if self.has_read else 0
        self.has_read = True
        with batch(self.model, budgets=[self.draft.budget]), called(conversion(self.model), _one):
            while len(logits) < room:
                logits.append(self._next_logits(ids))
                ids, probability = self._with_next(ids, logits[-1])
                if probability < self.draft.confidence:
                    break
        self.checks.is_next = bool(logits)
        if not logits:
            return input_ids, None
        self.cache.crop(-len(logits))
        self.draft.rounds += 1
        self.draft.drafted += len(logits)
        return ids, torch.stack(logits, 1)

    def update_candidate_strategy(self, _ids: Tensor, _scores: Tensor, num_matches: int) -> None:
        """Count what the model accepted of the last draft."""
        self.draft.accepted += int(num_matches)

    def _next_logits(self, ids: Tensor) -> Tensor:
        """Logits [1, vocabulary] of the token after `ids`, of which the cache holds all but the last."""
        kwargs: dict[str, Any] = {self.cache_name: self.cache, "use_cache": True, "return_dict": True}
        new = ids[:, -1:]
        if self.encoded is not None:
            found = self.model(decoder_input_ids=new, encoder_outputs=self.encoded, attention_mask=self.mask, **kwargs)
        else:
            if self.mask is not None:
                missing = int(self.cache.get_seq_length()) + 1 - self.mask.shape[1]
                kwargs["attention_mask"] = nn.functional.pad(self.mask, (0, missing), value=1)
            found = self.model(input_ids=new, **kwargs)
        logits = found.logits[:, -1].float()
        for process in self.processors:
            logits = process(ids, logits)
        return logits

    def _with_next(self, ids: Tensor, logits: Tensor) -> tuple[Tensor, float]:
        """`ids` and the token that follows by `logits`, and the probability of that token."""
        likely = logits.softmax(-1)
        token = torch.multinomial(likely, 1) if self.sampled else likely.argmax(-1, keepdim=True)
        return torch.cat((ids, token), 1), float(likely.gather(1, token))


def _empty_cache(*, cross_attention: bool) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache

    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if cross_attention else DynamicCache()
