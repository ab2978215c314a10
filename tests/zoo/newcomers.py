"""Models that nobody had looked at: their truths were written and committed before any of them was planned."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Inputs, Model
from tests.zoo.makers import SMALL, hf, pictures, words

_TEXT = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_BERT = """
            q,k,v attention.self.{query,key,value}  : 32 32
            o     attention.output.dense            : 32 32
            mlp   intermediate.dense > output.dense : 32 64 32"""
_GATED = "gated mlp.gate_proj*mlp.up_proj > mlp.down_proj : 32 64 32"


def _words_and_entities() -> dict[str, Any]:
    places = torch.tensor([[[1, 2, -1, -1], [3, -1, -1, -1], [5, 6, -1, -1]]]).repeat(2, 1, 1)
    return words() | {"entity_ids": torch.randint(1, 20, (2, 3)), "entity_position_ids": places}


def _tiles_and_text() -> dict[str, Any]:
    """One picture of one tile per text, which all words but the first see."""
    seen = torch.ones(2, 7, 1, 1, dtype=torch.long)
    seen[:, 0] = 0
    return words() | {
        "pixel_values": torch.randn(2, 1, 1, 3, 16, 16),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
        "cross_attention_mask": seen,
    }


def _patches_and_text() -> dict[str, Any]:
    """One picture of four by four patches, of which each two by two are one word."""
    ids = torch.tensor([[5, 6, 54, 55, 55, 55, 55, 7, 8]])
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(16, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 55).int(),
    }


def _speech() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 24, 16), "decoder_input_ids": torch.randint(5, 50, (2, 5))}


def _volo() -> tuple[nn.Module, Inputs]:
    from timm.models.volo import VOLO

    model = VOLO(
        layers=(1, 1),
        img_size=32,
        num_classes=10,
        patch_size=4,
        stem_hidden_dim=8,
        embed_dims=(16, 32),
        num_heads=(2, 4),
        downsamples=(True, False),
        outlook_attention=(True, False),
        post_layers=("ca",),
    )
    return model.eval(), torch.randn(2, 3, 32, 32)


MODELS = [
    Model(
        name="hf DETR",
        build=hf(
            "DetrModel",
            lambda: pictures(64),
            backbone_config={
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 16],
                "depths": [1, 1],
                "layer_type": "basic",
                "out_features": ["stage2"],
            },
            d_model=32,
            num_queries=5,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=64,
        ),
        # the first decoder layer starts from learned queries: no picture is in them before its cross attention
        truth="""
            in encoder.layers.#
            q,k,v self_attn.{q,k,v}_proj : 32 32
            o     self_attn.o_proj       : 32 32
            in decoder.layers.0
            k,v   encoder_attn.{k,v}_proj : 32 32
            o     encoder_attn.o_proj     : 32 32
            in decoder.layers.1
            q,k,v {self_attn,encoder_attn}.{q,k,v}_proj : 32 32
            o     {self_attn,encoder_attn}.o_proj       : 32 32
            in ~
            mlp {encoder,decoder}.layers.#.mlp.fc1 > {encoder,decoder}.layers.#.mlp.fc2 : 32 64 32""",
    ),
    Model(
        name="hf Perceiver",
        build=hf(
            "PerceiverModel",
            lambda: {"inputs": torch.randn(2, 12, 16)},
            num_latents=4,
            d_latents=32,
            d_model=16,
            num_blocks=2,
            num_self_attends_per_block=2,
            num_self_attention_heads=4,
            num_cross_attention_heads=4,
        ),
        # queries of the cross attention are learned; its keys and values keep the width of the inputs
        truth="""
            in encoder.cross_attention
            k,v attention.self.{key,value} : 16 16
            o   attention.output.dense     : 16 32
            mlp mlp.dense1 > mlp.dense2    : 32 32 32
            in encoder.self_attends.#
            q,k,v attention.self.{query,key,value} : 32 32 x2
            o     attention.output.dense           : 32 32 x2
            mlp   mlp.dense1 > mlp.dense2          : 32 32 32 x2""",
        uncounted="FlopCounterMode raises where a module's result is a view of a parameter",
    ),
    Model(
        name="hf LUKE",
        build=hf("LukeModel", _words_and_entities, **SMALL, **_TEXT, entity_vocab_size=20, entity_emb_size=16),
        # words ask words and entities by different queries, and so do entities
        truth=f"""
            in encoder.layer.#
            q attention.self.{{w2e_query,e2w_query,e2e_query}} : 32 32{_BERT}""",
    ),
    Model(
        name="hf Hiera",
        build=hf(
            "HieraModel",
            pictures,
            embed_dim=16,
            image_size=[32, 32],
            depths=[2, 1],
            num_heads=[2, 4],
            num_query_pool=1,
            masked_unit_size=[4, 4],
            masked_unit_attention=[True, False],
        ),
        # where the stage changes, what goes around the attention is projected and pooled
        truth="""
            in encoder.stages.0.layers.#
            qkv attn.qkv          : 16 48
            o   attn.proj         : 16 16
            mlp mlp.fc1 > mlp.fc2 : 16 64 16
            in encoder.stages.1.layers.0
            qkv attn.qkv          : 16 96
            o   attn.proj         : 32 32 none
            mlp mlp.fc1 > mlp.fc2 : 32 128 32""",
    ),
    Model(
        name="hf Llama 3.2 Vision",
        build=hf(
            "MllamaForConditionalGeneration",
            _tiles_and_text,
            image_token_index=50,
            text_config={**_LLAMA, **_TEXT, "num_hidden_layers": 2, "cross_attention_layers": [1]},
            vision_config={
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_global_layers": 1,
                "attention_heads": 4,
                "intermediate_size": 64,
                "image_size": 16,
                "patch_size": 8,
                "max_num_tiles": 1,
                "supported_aspect_ratios": [[1, 1]],
                "intermediate_layers_indices": [0],
                "vision_output_dim": 64,
            },
        ),
        # branches that are scaled by tanh of a parameter, and rows of text that see no picture are masked
        truth=f"""
            in model.vision_model.{{transformer,global_transformer}}.layers.0
            q,k,v self_attn.{{q,k,v}}_proj : 32 32
            o     self_attn.o_proj       : 32 32
            mlp   mlp.fc1 > mlp.fc2      : 32 64 32
            in model.language_model.layers.0
            q     self_attn.q_proj       : 32 32
            k,v   self_attn.{{k,v}}_proj   : 32 16
            o     self_attn.o_proj       : 32 32
            {_GATED}
            in model.language_model.layers.1
            q     cross_attn.q_proj      : 32 32
            k,v   cross_attn.{{k,v}}_proj  : 32 16
            o     cross_attn.o_proj      : 32 32
            {_GATED}""",
    ),
    Model(
        name="hf SeamlessM4T v2, speech to text",
        build=hf(
            "SeamlessM4Tv2ForSpeechToText",
            _speech,
            **_TEXT,
            hidden_size=32,
            feature_projection_input_dim=16,
            speech_encoder_layers=1,
            speech_encoder_attention_heads=4,
            speech_encoder_intermediate_size=64,
            conv_depthwise_kernel_size=7,
            num_adapter_layers=1,
            decoder_layers=1,
            decoder_attention_heads=4,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
        ),
        # in the adapter two convolutions make what is attended to and what goes around it
        truth="""
            in speech_encoder
            mlp   intermediate_ffn.intermediate_dense > intermediate_ffn.output_dense : 32 64 32
            in speech_encoder.encoder.layers.0
            mlp   {ffn1,ffn2}.intermediate_dense > {ffn1,ffn2}.output_dense : 32 64 32
            q,k,v self_attn.linear_{q,k,v} : 32 32
            o     self_attn.linear_out     : 32 32
            in speech_encoder.adapter.layers.0
            q,k,v self_attn.linear_{q,k,v} : 32 32
            o     self_attn.linear_out     : 32 32 none
            mlp   ffn.intermediate_dense > ffn.output_dense : 32 64 32
            in text_decoder.layers.0
            q,k,v {self_attn,cross_attention}.{q,k,v}_proj : 32 32
            o     {self_attn,cross_attention}.out_proj     : 32 32
            mlp   ffn.fc1 > ffn.fc2        : 32 64 32""",
    ),
    Model(
        name="hf Qwen2-VL",
        build=hf(
            "Qwen2VLForConditionalGeneration",
            _patches_and_text,
            image_token_id=55,
            vision_start_token_id=54,
            video_token_id=53,
            text_config={
                **_LLAMA,
                **_TEXT,
                "vocab_size": 60,
                "num_hidden_layers": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            },
            vision_config={
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 4,
            },
        ),
        # four patches are laid side by side before the merger, which nothing goes around
        truth=f"""
            in model.visual
            mlp merger.mlp.0 > merger.mlp.2 : 128 128 32 none
            in model.visual.blocks.0
            qkv attn.qkv          : 32 96
            o   attn.proj         : 32 32
            mlp mlp.fc1 > mlp.fc2 : 32 64 32
            in model.language_model.layers.#
            q   self_attn.q_proj     : 32 32
            k,v self_attn.{{k,v}}_proj : 32 16
            o   self_attn.o_proj     : 32 32
            {_GATED}""",
    ),
    Model(
        name="hf Gemma 3n",
        build=hf(
            "Gemma3nForCausalLM",
            words,
            by_class="Gemma3nTextConfig",
            **_LLAMA,
            **_TEXT,
            head_dim=8,
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=50,
            hidden_size_per_layer_input=8,
            activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0],
            altup_num_inputs=2,
            laurel_rank=8,
        ),
        # the first MLP cuts at the mean of its hidden values; the last two layers take keys from the first two
        truth=f"""
            in model.layers.{{0,1}}
            k,v self_attn.{{k,v}}_proj : 32 16
            in model.layers.#
            q   self_attn.q_proj     : 32 32
            o   self_attn.o_proj     : 32 32 normed
            in model.layers.{{1,2,3}}
            {_GATED} normed""",
        blocks=4,
        skips={"model.layers.0.mlp.down_proj": "op between the linears is not element-wise"},
    ),
    Model(
        name="hf CANINE",
        build=hf(
            "CanineModel",
            lambda: words(2, 16),
            **SMALL,
            num_hash_buckets=64,
            max_position_embeddings=64,
            local_transformer_stride=8,
        ),
        # the first encoder attends within two windows, one after the other
        truth=f"""
            in initial_char_encoder.layer.0
            q,k,v attention.self.{{query,key,value}}  : 32 32 x2
            o     attention.output.dense            : 32 32
            mlp   intermediate.dense > output.dense : 32 64 32
            in encoder.layer.#{_BERT}
            in final_char_encoder.layer.0{_BERT}""",
    ),
    Model(
        name="hf Reformer, local and hashed",
        build=hf(
            "ReformerModel",
            lambda: words(2, 16),
            attn_layers=["local", "lsh"],
            hidden_size=32,
            num_attention_heads=4,
            attention_head_size=8,
            feed_forward_size=64,
            local_attn_chunk_length=8,
            lsh_attn_chunk_length=8,
            num_buckets=2,
            axial_pos_embds=False,
            max_position_embeddings=64,
            vocab_size=50,
        ),
        # two streams, each changed by what is read from the other one; hashed attention has one matrix for q and k
        truth="""
            in encoder.layers.0
            q,k,v attention.self_attention.{query,key,value} : 32 32
            in encoder.layers.1
            qk    attention.self_attention.query_key : 32 32
            v     attention.self_attention.value     : 32 32
            in encoder.layers.#
            o     attention.output.dense             : 32 32
            mlp   feed_forward.dense.dense > feed_forward.output.dense : 32 64 32""",
    ),
    Model(
        name="timm VOLO",
        build=_volo,
        # outlook attention makes its weights from one token alone: it has values, neither queries nor keys
        truth="""
            in network.0.0
            v   attn.v            : 16 16
            o   attn.proj         : 16 16
            mlp mlp.fc1 > mlp.fc2 : 16 48 16
            in network.2.0
            qkv attn.qkv          : 32 96
            o   attn.proj         : 32 32
            mlp mlp.fc1 > mlp.fc2 : 32 96 32
            in post_network.0
            q   attn.q            : 32 32
            kv  attn.kv           : 32 64
            o   attn.proj         : 32 32
            mlp mlp.fc1 > mlp.fc2 : 32 96 32""",
    ),
]
