"""`nn.MultiheadAttention` with four real linears: the same signature and values, no packed weight, no fast path.

Shapes: B batch, T queries, S keys, E embedding, H heads, D = E / H.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from acm_compiler.acm.context import fx_node
from acm_compiler.errors import UsageError

_Thing = TypeVar("_Thing", nn.Parameter, nn.Linear, "UnpackedAttention")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
HOOK_TABLES = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook"),
)


class UnpackedAttention(nn.Module):
    """The computation of `nn.MultiheadAttention` through `q_proj`, `k_proj`, `v_proj` and `out_proj`.

    Each projection is called as a module, on its input as it was given: [B, T, E] when `batch_first`, else
    [T, B, E]; an input without a batch axis gets one of size 1 in front. Checkpoints with packed weights load.
    """

    # enclosing torch modules look here to tell whether their fused path may read packed weights
    _qkv_same_embed_dim: ClassVar[bool] = False
    in_proj_weight: ClassVar[None] = None
    in_proj_bias: ClassVar[None] = None

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(self, packed: nn.MultiheadAttention, projections: dict[str, nn.Linear]) -> None:
        super().__init__()
        self.embed_dim, self.kdim, self.vdim = packed.embed_dim, packed.kdim, packed.vdim
        self.num_heads, self.head_dim = packed.num_heads, packed.head_dim
        self.dropout, self.batch_first = packed.dropout, packed.batch_first
        self.add_zero_attn = packed.add_zero_attn
        for name, linear in projections.items():
            self.add_module(name, linear)
        self.out_proj = packed.out_proj
        self.bias_k, self.bias_v = packed.bias_k, packed.bias_v  # type: ignore[assignment]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, shaped like `query`, and the attention weights or None; see `nn.MultiheadAttention`."""
        if isinstance(query, Proxy):  # a leaf of symbolic traces, as torch's own attention is
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return fx_node(self, query, key, value, *options)
        if query.is_nested or key.is_nested or value.is_nested:
            raise UsageError(
                "nested tensors need torch's fused attention, which has no separate projections",
                fix="pass padded tensors and a key_padding_mask",
            )
        if is_causal and attn_mask is None:
            raise UsageError("is_causal is a hint about attn_mask, which is missing", fix="pass attn_mask too")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        batch_first = self.batch_first or not batched
        # with nothing else to mask and no weights to show, the hint stands for the mask
        use_hint = is_causal and key_padding_mask is None and not need_weights
        mask = None if use_hint else self._mask(attn_mask, key_padding_mask, query.dtype)
        q_BHTD = self._heads(self.q_proj(query), batch_first)
        k_BHSD = self._heads(self._extended(self.k_proj(key), self.bias_k, batch_first), batch_first)
        v_BHSD = self._heads(self._extended(self.v_proj(value), self.bias_v, batch_first), batch_first)
        attend = self._attend_showing_weights if need_weights else self._attend
        y_BHTD, weights = attend(q_BHTD, k_BHSD, v_BHSD, mask, use_hint)
        y = y_BHTD.transpose(1, 2) if batch_first else y_BHTD.permute(2, 0, 1, 3)
        y = self.out_proj(y.flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            y, weights = y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y, weights

    def _attend(
        self, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, None]:
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, mask, p, causal), None

    def _attend_showing_weights(
        self, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        scores_BHTS = (q_BHTD * math.sqrt(1.0 / self.head_dim)) @ k_BHSD.transpose(-2, -1)
        if mask is not None:
            scores_BHTS = scores_BHTS + mask
        weights_BHTS = F.dropout(scores_BHTS.softmax(dim=-1), self.dropout, self.training)
        return weights_BHTS @ v_BHSD, weights_BHTS

    def _heads(self, x: Tensor, batch_first: bool) -> Tensor:
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)

    def _extended(self, x: Tensor, bias: Tensor | None, batch_first: bool) -> Tensor:
        """Keys or values with the learned row and the row of zeros that the options ask for."""
        tokens = 1 if batch_first else 0
        row = x.narrow(tokens, 0, 1)
        if bias is not None:
            x = torch.cat([x, bias.to(x.dtype).expand_as(row)], dim=tokens)
        if self.add_zero_attn:
            x = torch.cat([x, torch.zeros_like(row)], dim=tokens)
        return x

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Both masks as one to be added to [B, H, T, S] scores, with room for the rows of `_extended`."""
        extra = (self.bias_k is not None) + bool(self.add_zero_attn)
        total = None
        if attn_mask is not None:
            total = F.pad(_additive(attn_mask, dtype), (0, extra))
            if total.dim() == 3:
                total = total.unflatten(0, (-1, self.num_heads))
        if padding is not None:
            padding = F.pad(_additive(padding, dtype), (0, extra))[:, None, None, :]
            total = padding if total is None else total + padding
        return total

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        bias = state_dict.pop(f"{prefix}in_proj_bias", None)
        weight = state_dict.pop(f"{prefix}in_proj_weight", None)
        for i, name in enumerate(_PROJECTIONS):
            rows = slice(i * self.embed_dim, (i + 1) * self.embed_dim)
            own = state_dict.pop(f"{prefix}{name}_weight", None)
            if weight is not None or own is not None:
                state_dict[f"{prefix}{name}.weight"] = own if weight is None else weight[rows]
            if bias is not None:
                state_dict[f"{prefix}{name}.bias"] = bias[rows]
        super()._load_from_state_dict(state_dict, prefix, *args)


def unpack_attention(packed: nn.MultiheadAttention, *, share_memory: bool = False) -> UnpackedAttention:
    """An equivalent of `packed` with a linear per projection, in the same mode and with the same hooks.

    q, k and v are new leaf parameters with the dtype, device and requires_grad of the packed ones: rows of them,
    copied, or views of their memory with `share_memory`. `out_proj`, `bias_k` and `bias_v` stay the same objects.
    """
    bias = packed.in_proj_bias
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    if packed._qkv_same_embed_dim:
        weights, parents = packed.in_proj_weight.chunk(3), (packed.in_proj_weight,) * 3
    else:
        weights = parents = (packed.q_proj_weight, packed.k_proj_weight, packed.v_proj_weight)

    def leaf(rows: Tensor, parent: nn.Parameter) -> nn.Parameter:
        data = rows.detach()
        return _initialized(nn.Parameter(data if share_memory else data.clone(), parent.requires_grad))

    linears: dict[str, nn.Linear] = {}
    for name, w, parent, b in zip(_PROJECTIONS, weights, parents, biases, strict=True):
        # on meta: no memory, and no random numbers drawn
        linear = linears[name] = _initialized(nn.Linear(w.shape[1], w.shape[0], bias=b is not None, device="meta"))
        linear.weight = leaf(w, parent)
        linear.bias = None if b is None else leaf(b, bias)
        linear.train(packed.training)
    unpacked = _initialized(UnpackedAttention(packed, linears))
    unpacked.training = packed.training
    for name in HOOK_TABLES:
        # the very dictionaries, so that handles given out before still remove their hooks
        setattr(unpacked, name, getattr(packed, name))
    return unpacked


def _initialized(thing: _Thing) -> _Thing:
    """Marked so that transformers' `init_weights` leaves it alone."""
    thing._is_hf_initialized = True  # type: ignore[union-attr, attr-defined, assignment]
    return thing


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to be added: 0 where a key may be attended to and -inf where a boolean mask says True."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
    if not mask.is_floating_point():
        raise UsageError("an attention mask of a kind with no meaning", found=mask.dtype, expected="bool or float")
    return mask
