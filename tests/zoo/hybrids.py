"""Models with recurrences in place of attention or beside it: the recurrent parts stay dense."""

from __future__ import annotations

import functools

from tests.zoo.entry import Model
from tests.zoo.makers import text

_GROUPED = functools.partial(text, num_key_value_heads=2)
_ATTENTION = """
    q   self_attn.q_proj     : 32 32
    k,v self_attn.{k,v}_proj : 32 16
    o   self_attn.o_proj     : 32 32"""
_FEED_FORWARD = "gated feed_forward.gate_proj*feed_forward.up_proj > feed_forward.down_proj : 32 64 32"

MODELS = [
    Model(name="hf Mamba", build=text("MambaForCausalLM", state_size=4), truth=""),
    Model(
        name="hf Mamba-2",
        build=text("Mamba2ForCausalLM", state_size=4, num_heads=8, head_dim=8, n_groups=1, chunk_size=4),
        truth="",
    ),
    Model(
        name="hf Jamba",
        build=_GROUPED(
            "JambaForCausalLM",
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            mamba_d_state=4,
            mamba_dt_rank=4,
        ),
        truth=f"""
            in model.layers.0
            {_FEED_FORWARD}
            in model.layers.1
            {_ATTENTION}""",
        skips={"model.layers.1.feed_forward.experts*": "mixture of experts"},
    ),
    Model(
        name="hf Bamba",
        build=_GROUPED(
            "BambaForCausalLM",
            attn_layer_indices=[1],
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_d_state=4,
            mamba_chunk_size=4,
        ),
        truth=f"""
            in model.layers.#
            {_FEED_FORWARD}
            in model.layers.1
            {_ATTENTION}""",
    ),
    Model(
        name="hf Falcon-H1",
        build=_GROUPED(
            "FalconH1ForCausalLM",
            mamba_d_ssm=32,
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_d_state=4,
            mamba_chunk_size=4,
        ),
        # attention and a recurrence side by side
        truth=f"""
            in model.layers.#
            {_FEED_FORWARD}
            {_ATTENTION}""",
    ),
    Model(
        name="hf RecurrentGemma",
        build=_GROUPED(
            "RecurrentGemmaForCausalLM",
            lru_width=32,
            attention_window_size=8,
            block_types=["recurrent", "attention"],
        ),
        # the recurrent block is a gated MLP with a convolution and a recurrence between its linears
        truth="""
            in model.layers.#
            gated mlp_block.gate_proj*mlp_block.up_proj > mlp_block.down_proj : 32 32 32
            in model.layers.1.temporal_block
            q   q_proj     : 32 32
            k,v {k,v}_proj : 32 16
            o   o_proj     : 32 32""",
    ),
    Model(
        name="hf RWKV, weights divided in eval",
        build=text("RwkvForCausalLM", attention_hidden_size=32),
        # the first forward divides feed_forward.value.weight in place
        truth="",
        skips={"rwkv.blocks.0.feed_forward.value": "its weight is computed from parameters"},
    ),
    Model(
        name="hf RWKV",
        build=text("RwkvForCausalLM", attention_hidden_size=32, rescale_every=0),
        # the MLP's result is multiplied by a gate of its own input before it is added
        truth="mlp rwkv.blocks.#.feed_forward.key > rwkv.blocks.#.feed_forward.value : 32 64 32",
    ),
    Model(
        name="hf Qwen3-Next",
        build=_GROUPED(
            "Qwen3NextForCausalLM",
            head_dim=8,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            layer_types=["linear_attention", "full_attention"],
        ),
        # q_proj also holds the gate of attention's output
        truth="""
            in model.layers.#.mlp.shared_expert
            gated gate_proj*up_proj > down_proj : 32 40 32
            in model.layers.1
            q   self_attn.q_proj     : 32 64
            k,v self_attn.{k,v}_proj : 32 16
            o   self_attn.o_proj     : 32 32""",
        skips={"model.layers.0.mlp.experts*": "mixture of experts"},
    ),
    Model(
        name="hf LFM2",
        build=_GROUPED("Lfm2ForCausalLM", layer_types=["conv", "full_attention"]),
        truth="""
            in model.layers.#
            gated feed_forward.w1*feed_forward.w3 > feed_forward.w2 : 32 256 32
            in model.layers.1
            q   self_attn.q_proj     : 32 32
            k,v self_attn.{k,v}_proj : 32 16
            o   self_attn.out_proj   : 32 32""",
    ),
]
