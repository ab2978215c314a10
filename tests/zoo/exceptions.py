"""Exceptions of the zoo, by name and with the reason; nothing is proved of these models.

Each entry is checked: where the original does it after all, the proof fails and the entry must go.
"""

from __future__ import annotations

_GROUPED = "the grouped products of its experts know no float64"
_NO_HALF_FFT = "the Fourier transform knows no half precision"

EXCEPTIONS: dict[str, dict[str, str]] = {
    "torch.bfloat16": {"hf FNet": _NO_HALF_FFT},
    "torch.float16": {"hf FNet": _NO_HALF_FFT},
    "torch.float64": {
        "hf CANINE": "its masks add up to what float64 does not hold, and it answers nan",
        "hf XGLM": "it fills its mask with a number that float32 alone takes",
        "hf Mixtral": _GROUPED,
        "hf Qwen2-MoE": _GROUPED,
        "hf Qwen3-MoE": _GROUPED,
        "hf OLMoE": _GROUPED,
        "hf GPT-OSS": _GROUPED,
        "hf Granite MoE": _GROUPED,
        "hf DeepSeek-V3": _GROUPED,
        "hf DeepSeek-V2": _GROUPED,
        "hf Jamba": _GROUPED,
        "hf Qwen3-Next": _GROUPED,
    },
    "generate with a static cache": {"hf ProphetNet": "its own attention expects another shape than that cache has"},
    "generate with beams": {"hf RWKV": "its state cannot be reordered"},
    "backward": {
        "hf RWKV": "it changes in place what its backward pass needs",
        "hf Reformer, local and hashed": "its backward pass is its own and refuses to run in eval mode",
    },
    "torch.export": {
        "hf Longformer": "its number of global tokens depends on values",
        "hf LongT5": "it reads the shape of what is not there under export",
        "hf FSMT": "it asks whether a mask holds any padding",
        "hf Switch Transformer": "it reads what is not there under export",
        "hf ViLT": "how many patches it keeps depends on the pixel mask's values",
        "hf LLaVA": "it gives a cache, whose type export does not know",
        "hf Qwen2-VL": "how it splits the patches of its pictures depends on values",
        "hf Llama 3.2 Vision": "it gives a cache, whose type export does not know",
    },
    "dropout": {"own GEGLU in a Sequential": "its only dropout lies on hidden values, where learners have none"},
    "checkpointing of its own": {
        "hf GIT": "its blocks add to their cache again when they are computed again",
        "timm CoaT-Lite": "its makers gave it the switch, which refuses",
        "timm Twins SVT": "its makers gave it the switch, which refuses",
        "timm ConViT": "its makers gave it the switch, which refuses",
    },
}
"""proof -> model -> why the original does not do it."""
