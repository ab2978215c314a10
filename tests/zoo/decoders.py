"""transformers' language models that read from left to right."""

from __future__ import annotations

import functools

from tests.zoo.entry import Model
from tests.zoo.makers import text


def _llama(*, kv: int = 16, bypass: str = "bypass") -> str:
    return f"""
        in model.layers.#
        q   self_attn.q_proj     : 32 32
        k,v self_attn.{{k,v}}_proj : 32 {kv}
        o   self_attn.o_proj     : 32 32 {bypass}
        gated mlp.gate_proj*mlp.up_proj > mlp.down_proj : 32 64 32 {bypass}"""


_GPT = functools.partial(text, n_embd=32, n_layer=2, n_head=4)
_GROUPED = functools.partial(text, num_key_value_heads=2)
_GEMMA = functools.partial(text, head_dim=8, num_key_value_heads=2)
_GATE_UP = "gated mlp.gate_up_proj[0:64]*mlp.gate_up_proj[64:128] > mlp.down_proj : 32 64 32"
_GPT2 = """
    in {0}h.#
    qkv attn.c_attn           : 32 96
    o   attn.c_proj           : 32 32
    mlp mlp.c_fc > mlp.c_proj : 32 128 32"""

MODELS = [
    Model(name="hf GPT-2", build=_GPT("GPT2LMHeadModel"), truth=_GPT2.format("transformer.")),
    Model(name="hf OpenAI GPT", build=_GPT("OpenAIGPTLMHeadModel"), truth=_GPT2.format("transformer.")),
    Model(
        name="hf GPT-BigCode",
        build=_GPT("GPTBigCodeForCausalLM"),
        # one key head and one value head
        truth="""
            in transformer.h.#
            qkv attn.c_attn           : 32 48
            o   attn.c_proj           : 32 32
            mlp mlp.c_fc > mlp.c_proj : 32 128 32""",
    ),
    Model(
        name="hf GPT-Neo",
        build=text(
            "GPTNeoForCausalLM",
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=32,
            window_size=4,
        ),
        truth="""
            in transformer.h.#
            q,k,v attn.attention.{q,k,v}_proj : 32 32
            o     attn.attention.out_proj     : 32 32
            mlp   mlp.c_fc > mlp.c_proj       : 32 64 32""",
    ),
    Model(
        name="hf GPT-J",
        build=_GPT("GPTJForCausalLM", rotary_dim=4),
        truth="""
            in transformer.h.#
            q,k,v attn.{q,k,v}_proj      : 32 32
            o     attn.out_proj          : 32 32
            mlp   mlp.fc_in > mlp.fc_out : 32 128 32""",
    ),
    Model(
        name="hf CodeGen",
        build=_GPT("CodeGenForCausalLM", rotary_dim=4),
        truth="""
            in transformer.h.#
            qkv attn.qkv_proj          : 32 96
            o   attn.out_proj          : 32 32
            mlp mlp.fc_in > mlp.fc_out : 32 128 32""",
    ),
    Model(
        name="hf GPT-NeoX",
        build=text("GPTNeoXForCausalLM"),
        truth="""
            in gpt_neox.layers.#
            qkv attention.query_key_value : 32 96
            o   attention.dense           : 32 32
            mlp mlp.dense_h_to_4h > mlp.dense_4h_to_h : 32 64 32""",
    ),
    Model(
        name="hf OPT",
        build=text("OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
        truth="""
            in model.decoder.layers.#
            q,k,v self_attn.{q,k,v}_proj : 32 32
            o     self_attn.out_proj     : 32 32
            mlp   fc1 > fc2              : 32 64 32""",
    ),
    Model(
        name="hf BLOOM",
        build=text("BloomForCausalLM", n_layer=2, n_head=4),
        truth="""
            in transformer.h.#
            qkv self_attention.query_key_value : 32 96
            o   self_attention.dense           : 32 32
            mlp mlp.dense_h_to_4h > mlp.dense_4h_to_h : 32 128 32""",
    ),
    Model(
        name="hf Falcon, parallel, one key head",
        build=text("FalconForCausalLM", new_decoder_architecture=False, multi_query=True, parallel_attn=True),
        truth="""
            in transformer.h.#
            qkv self_attention.query_key_value : 32 48
            o   self_attention.dense           : 32 32
            mlp mlp.dense_h_to_4h > mlp.dense_4h_to_h : 32 128 32""",
    ),
    Model(
        name="hf Falcon, new architecture",
        build=text("FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=2),
        truth="""
            in transformer.h.#
            qkv self_attention.query_key_value : 32 64
            o   self_attention.dense           : 32 32
            mlp mlp.dense_h_to_4h > mlp.dense_4h_to_h : 32 128 32""",
    ),
    Model(
        name="hf MPT",
        build=text("MptForCausalLM", d_model=32, n_heads=4, n_layers=2),
        truth="""
            in transformer.blocks.#
            qkv attn.Wqkv                   : 32 96
            o   attn.out_proj               : 32 32
            mlp ffn.up_proj > ffn.down_proj : 32 128 32""",
    ),
    Model(
        name="hf Persimmon",
        build=text("PersimmonForCausalLM"),
        truth="""
            in model.layers.#
            qkv self_attn.query_key_value : 32 96
            o   self_attn.dense           : 32 32
            mlp mlp.dense_h_to_4h > mlp.dense_4h_to_h : 32 64 32""",
    ),
    Model(name="hf Llama", build=_GROUPED("LlamaForCausalLM"), truth=_llama()),
    Model(name="hf Mistral", build=_GROUPED("MistralForCausalLM"), truth=_llama()),
    Model(name="hf Qwen2", build=_GROUPED("Qwen2ForCausalLM"), truth=_llama()),
    Model(name="hf Qwen3", build=_GEMMA("Qwen3ForCausalLM"), truth=_llama()),
    Model(name="hf Gemma", build=text("GemmaForCausalLM", head_dim=8, num_key_value_heads=1), truth=_llama(kv=8)),
    Model(name="hf Gemma 2", build=_GEMMA("Gemma2ForCausalLM"), truth=_llama(bypass="normed")),
    Model(name="hf Gemma 3", build=_GEMMA("Gemma3ForCausalLM"), truth=_llama(bypass="normed")),
    Model(name="hf OLMo 2", build=_GROUPED("Olmo2ForCausalLM"), truth=_llama(bypass="normed")),
    Model(name="hf Cohere, parallel", build=_GROUPED("CohereForCausalLM"), truth=_llama()),
    Model(name="hf Cohere 2, parallel", build=_GROUPED("Cohere2ForCausalLM"), truth=_llama()),
    Model(name="hf StableLM", build=_GROUPED("StableLmForCausalLM"), truth=_llama()),
    Model(name="hf Granite", build=_GROUPED("GraniteForCausalLM"), truth=_llama()),
    Model(name="hf SmolLM3", build=_GROUPED("SmolLM3ForCausalLM"), truth=_llama()),
    Model(name="hf DiffLlama", build=_GROUPED("DiffLlamaForCausalLM"), truth=_llama()),
    Model(
        name="hf Phi, parallel",
        build=text("PhiForCausalLM"),
        truth="""
            in model.layers.#
            q,k,v self_attn.{q,k,v}_proj : 32 32
            o     self_attn.dense        : 32 32
            mlp   mlp.fc1 > mlp.fc2      : 32 64 32""",
    ),
    Model(
        name="hf Phi-3",
        build=_GROUPED("Phi3ForCausalLM"),
        truth=f"""
            in model.layers.#
            qkv   self_attn.qkv_proj : 32 64
            o     self_attn.o_proj   : 32 32
            {_GATE_UP}""",
    ),
    Model(
        name="hf GLM",
        build=_GEMMA("GlmForCausalLM"),
        truth=f"""
            in model.layers.#
            q     self_attn.q_proj     : 32 32
            k,v   self_attn.{{k,v}}_proj : 32 16
            o     self_attn.o_proj     : 32 32
            {_GATE_UP}""",
    ),
    Model(
        name="hf GLM-4",
        build=_GEMMA("Glm4ForCausalLM"),
        truth=f"""
            in model.layers.#
            q     self_attn.q_proj     : 32 32
            k,v   self_attn.{{k,v}}_proj : 32 16
            o     self_attn.o_proj     : 32 32 normed
            {_GATE_UP} normed""",
    ),
    Model(
        name="hf StarCoder 2",
        build=_GROUPED("Starcoder2ForCausalLM"),
        truth="""
            in model.layers.#
            q   self_attn.q_proj      : 32 32
            k,v self_attn.{k,v}_proj  : 32 16
            o   self_attn.o_proj      : 32 32
            mlp mlp.c_fc > mlp.c_proj : 32 64 32""",
    ),
    Model(
        name="hf Nemotron",
        build=_GROUPED("NemotronForCausalLM"),
        truth="""
            in model.layers.#
            q   self_attn.q_proj     : 32 32
            k,v self_attn.{k,v}_proj : 32 16
            o   self_attn.o_proj     : 32 32
            mlp mlp.up_proj > mlp.down_proj : 32 64 32""",
    ),
    Model(
        name="hf BitNet",
        build=_GROUPED("BitNetForCausalLM"),
        # the MLP has a norm between its linears
        truth="""
            in model.layers.#
            q   self_attn.q_proj     : 32 32
            k,v self_attn.{k,v}_proj : 32 16
            o   self_attn.o_proj     : 32 32""",
        skips={"model.layers.0.mlp.*": "norm over the hidden axis"},
    ),
    Model(
        name="hf Apertus",
        build=_GROUPED("ApertusForCausalLM"),
        # the MLP's activation has learned parameters
        truth="""
            in model.layers.#
            q   self_attn.q_proj     : 32 32
            k,v self_attn.{k,v}_proj : 32 16
            o   self_attn.o_proj     : 32 32""",
    ),
    Model(
        name="hf BioGPT",
        build=text("BioGptForCausalLM"),
        truth="""
            in biogpt.layers.#
            q,k,v self_attn.{q,k,v}_proj : 32 32
            o     self_attn.out_proj     : 32 32
            mlp   fc1 > fc2              : 32 64 32""",
    ),
    Model(
        name="hf XGLM",
        build=text("XGLMForCausalLM", d_model=32, num_layers=2, attention_heads=4, ffn_dim=64),
        truth="""
            in model.layers.#
            q,k,v self_attn.{q,k,v}_proj : 32 32
            o     self_attn.out_proj     : 32 32
            mlp   fc1 > fc2              : 32 64 32""",
    ),
    Model(
        name="hf CTRL",
        build=_GPT("CTRLLMHeadModel", dff=64),
        truth="""
            in transformer.h.#
            q,k,v multi_head_attention.W{q,k,v} : 32 32
            o     multi_head_attention.dense    : 32 32
            mlp   ffn.0 > ffn.2                 : 32 64 32""",
    ),
]
