"""The class that vLLM builds for a saved folder: its Transformers backend, with ACMs in their places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.transformers import TransformersForCausalLM

from acm_compiler.errors import UsageError
from acm_compiler.serving.vllm.budgets import SavedBudgets, token_settings
from acm_compiler.serving.vllm.sites import Places


class AcmForCausalLM(TransformersForCausalLM):
    """A decoder of transformers whose MLPs and projections are ACMs; built from plan.json, nothing is traced."""

    def recursive_replace(self) -> None:
        """Let vLLM put in its own layers everywhere but at the sites, and ACMs there."""
        if not self.model.is_backend_compatible():
            raise UsageError(f"vLLM cannot run the attention of transformers' {type(self.model).__name__}")
        saved = SavedBudgets.of_engine(self.vllm_config)
        self._tokens = token_settings(self.vllm_config)
        places = Places(self.model, saved.owner.plan.sites, prefix=self.model.base_model_prefix)
        super().recursive_replace()
        like = torch.empty((), dtype=self.model_config.dtype, device=self.device_config.device)
        places.fill(saved, self._tokens, like=like)

    def forward(self, input_ids: Tensor, positions: Tensor, *args: Any, **options: Any) -> Any:
        """Run the model, each token at its request's budget."""
        metadata = get_forward_context().attn_metadata
        if metadata:  # none while vLLM measures memory and compiles
            starts = next(iter(metadata.values())).query_start_loc.tolist()
            self._tokens.write(input_ids, positions, starts)
        return super().forward(input_ids, positions, *args, **options)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a folder's weights: ACMs take their own, vLLM's layers theirs, and buffers what was saved of them."""
        return super().load_weights(self._parameters_among(weights))

    def _parameters_among(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        for name, tensor in weights:
            buffer = buffers.get(name.removeprefix(f"{self.model.base_model_prefix}."))
            if buffer is not None:
                buffer.copy_(tensor)
            elif tensor.numel():  # an empty one keeps other loaders from taking the folder for a dense model
                yield name, tensor
