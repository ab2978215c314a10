"""vLLM's way to check and to follow requests, a logits processor: ours reads their budgets and leaves logits alone."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from torch import Tensor
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from acm_compiler.errors import AcmError
from acm_compiler.serving.vllm.budgets import Row, SavedBudgets, asked_by, token_settings

_FOLDER = "Folder_"


class Budgets(LogitsProcessor):
    """Reader of the budgets among a request's extra arguments."""

    refusal: ClassVar[str | None] = None
    folder: ClassVar[str]

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise VLLMValidationError, which clients get as status 400, for budgets that cannot be kept."""
        asked = asked_by(sampling_params)
        if not asked:
            return
        if cls.refusal:
            raise VLLMValidationError(cls.refusal)
        try:
            _saved(cls.folder).of_request(asked)
        except AcmError as error:
            raise VLLMValidationError(str(error)) from error

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._tokens = token_settings(vllm_config)
        self._saved = SavedBudgets.of_engine(vllm_config)

    def is_argmax_invariant(self) -> bool:
        """True: greedy requests need not call `apply`."""
        return True

    def apply(self, logits: Tensor) -> Tensor:
        """The logits as they are."""
        return logits

    def update_state(self, batch_update: Any) -> None:
        """Follow the requests that come, go and change places before the next forward."""
        process_dict_updates(self._tokens.rows, batch_update, self._row)

    def _row(self, sampling_params: Any, prompt: list[int] | None, written: list[int]) -> Row:
        row = Row(len(prompt or ()), self._saved.of_request(asked_by(sampling_params)))
        row.find_answer(written, row.prompt)  # of a request that is run again
        return row


class OtherDevice(Budgets):
    """Refuses budgets in requests where they were never tried."""

    refusal = (
        "budgets of requests are kept on CPUs alone; the server's own budget holds: "
        "--additional-config '{\"acm_budget\": 0.5}'"
    )


_saved = cache(SavedBudgets.read)


def processor_for(vllm_config: Any) -> str:
    """Name, as vLLM takes it, of the processor that fits the engine's settings.

    Requests are checked by a class alone, in a process that may know nothing but its name: the folder is part of it.
    """
    if not current_platform.is_cpu():
        name = OtherDevice.__name__
    else:
        name = _FOLDER + vllm_config.model_config.model.encode().hex()
    return f"{__name__}:{name}"


@cache
def _of_folder(name: str) -> type[Budgets]:
    return type(
        name, (Budgets,), {"folder": bytes.fromhex(name.removeprefix(_FOLDER)).decode(), "__module__": __name__}
    )


def __getattr__(name: str) -> Any:
    if name.startswith(_FOLDER):
        return _of_folder(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
