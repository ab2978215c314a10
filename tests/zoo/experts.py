"""Mixtures of experts: what is routed stays dense, the rest is converted."""

from __future__ import annotations

import functools

from tests.zoo.entry import Model
from tests.zoo.makers import hf, text, word_pairs

_GROUPED = functools.partial(text, num_key_value_heads=2, num_experts_per_tok=2)
_ATTENTION = """
    in model.layers.#
    q   self_attn.q_proj     : 32 32
    k,v self_attn.{k,v}_proj : 32 16
    o   self_attn.o_proj     : 32 32"""
_SHARED = """
    gated mlp.shared_expert.gate_proj*mlp.shared_expert.up_proj > mlp.shared_expert.down_proj : 32 40 32"""
_EXPERTS = "mixture of experts"
_LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_shared_experts": 1,
}
# kv_a_proj_with_mqa packs the rotary key with the input of kv_b_proj
_LATENT_TRUTH = """
    in model.layers.#
    kv self_attn.kv_b_proj : 8 64
    o  self_attn.o_proj    : 32 32
    in ~
    gated model.layers.0.mlp.gate_proj*model.layers.0.mlp.up_proj > model.layers.0.mlp.down_proj : 32 64 32
    in model.layers.1.mlp.shared_experts
    gated gate_proj*up_proj > down_proj : 32 24 32"""

MODELS = [
    Model(
        name="hf Mixtral",
        build=_GROUPED("MixtralForCausalLM", num_local_experts=4),
        truth=_ATTENTION,
        skips={"model.layers.0.mlp.experts*": _EXPERTS, "model.layers.0.mlp.gate*": "router"},
    ),
    Model(
        name="hf Qwen2-MoE",
        build=_GROUPED(
            "Qwen2MoeForCausalLM", moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=4
        ),
        truth=_ATTENTION + _SHARED,
        skips={"model.layers.0.mlp.experts*": _EXPERTS},
    ),
    Model(
        name="hf Qwen3-MoE",
        build=_GROUPED("Qwen3MoeForCausalLM", head_dim=8, moe_intermediate_size=24, num_experts=4),
        truth=_ATTENTION,
        skips={"model.layers.0.mlp.experts*": _EXPERTS},
    ),
    Model(
        name="hf OLMoE",
        build=_GROUPED("OlmoeForCausalLM", num_experts=4),
        truth=_ATTENTION,
        skips={"model.layers.0.mlp.experts*": _EXPERTS},
    ),
    Model(
        name="hf GPT-OSS",
        build=_GROUPED("GptOssForCausalLM", head_dim=8, num_local_experts=4),
        truth=_ATTENTION,
        skips={"model.layers.0.mlp.experts*": _EXPERTS},
    ),
    Model(
        name="hf Granite MoE",
        build=_GROUPED("GraniteMoeForCausalLM", num_local_experts=4),
        truth=_ATTENTION,
        skips={"model.layers.0.block_sparse_moe.experts*": _EXPERTS},
    ),
    Model(
        name="hf DeepSeek-V3",
        build=text("DeepseekV3ForCausalLM", num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=16, **_LATENT),
        truth="q model.layers.#.self_attn.q_b_proj : 16 48" + _LATENT_TRUTH,
        skips={"model.layers.1.mlp.experts*": _EXPERTS, "model.layers.0.self_attn.kv_a_proj_with_mqa": "packed"},
    ),
    Model(
        name="hf DeepSeek-V2",
        build=text("DeepseekV2ForCausalLM", num_experts_per_tok=2, q_lora_rank=None, **_LATENT),
        truth="q model.layers.#.self_attn.q_proj : 32 48" + _LATENT_TRUTH,
        skips={"model.layers.1.mlp.experts*": _EXPERTS},
    ),
    Model(
        name="hf Switch Transformer",
        build=hf(
            "SwitchTransformersForConditionalGeneration",
            word_pairs,
            vocab_size=50,
            d_model=32,
            d_ff=64,
            d_kv=8,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            num_experts=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        ),
        # the first block of each half is dense, the second routes
        truth="""
            in encoder.block.#.layer
            q,k,v 0.SelfAttention.{q,k,v} : 32 32
            o     0.SelfAttention.o       : 32 32
            in decoder.block.#.layer
            q,k,v {0.SelfAttention,1.EncDecAttention}.{q,k,v} : 32 32
            o     {0.SelfAttention,1.EncDecAttention}.o       : 32 32
            in ~
            mlp encoder.block.0.layer.1.mlp.wi > encoder.block.0.layer.1.mlp.wo : 32 64 32
            mlp decoder.block.0.layer.2.mlp.wi > decoder.block.0.layer.2.mlp.wo : 32 64 32""",
        skips={"encoder.block.1.layer.1.mlp.experts*": _EXPERTS},
    ),
]
