"""A small Llama in a GGUF file, written as llama.cpp lays it out."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

HEADS, LAYERS, WIDTH = 4, 2, 32
WORDS = ("<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "th", "the", "Ġthe")
MERGES = ("t h", "th e", "Ġ the")
_PLACES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def small_llama(**changes: Any) -> nn.Module:
    """A Llama of drawn weights with a vocabulary of these words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    settings = {"vocab_size": len(WORDS), "tie_word_embeddings": True, "max_position_embeddings": 64, **sizes}
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()


def write_gguf(
    path: Path, model: Any, *, architecture: str = "llama", tokenizer: bool = True, without: str | None = None
) -> Path:
    """`model` in a GGUF file; `without` the tensors whose names hold this text."""
    from gguf import GGUFWriter

    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        _add_tokenizer(writer)
    for name, tensor in _tensors(model):
        if without is None or without not in name:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(WORDS))
    writer.add_token_types([3, *[1] * (len(WORDS) - 1)])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def _tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    """llama.cpp's names; rows of q and k in its order, where the halves of a head's rotation alternate."""
    state = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    found = [
        ("token_embd.weight", state["model.embed_tokens.weight"]),
        ("output_norm.weight", state["model.norm.weight"]),
    ]
    for layer in range(model.config.num_hidden_layers):
        for ours, theirs in _PLACES.items():
            for kind in ("weight", "bias"):
                tensor = state.get(f"model.layers.{layer}.{ours}.{kind}")
                if tensor is None:
                    continue
                if theirs in ("attn_q", "attn_k"):
                    tensor = tensor.unflatten(0, (HEADS, 2, -1)).swapaxes(1, 2).flatten(0, 2)
                found.append((f"blk.{layer}.{theirs}.{kind}", tensor))
    return found
