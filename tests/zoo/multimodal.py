"""transformers' models of images and text together."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.entry import Model
from tests.zoo.makers import SMALL, hf, pictures, words

_ONE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
_SEES = {**_ONE, "image_size": 32, "patch_size": 8}
_READS = {**_ONE, "vocab_size": 50, "max_position_embeddings": 16, "pad_token_id": 0}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}


def _pair() -> dict[str, Any]:
    return words() | pictures()


def _masked_pair() -> dict[str, Any]:
    return _pair() | {"attention_mask": torch.ones(2, 7, dtype=torch.long)}


def _picture_in_text() -> dict[str, Any]:
    """Sixteen places of the text are for the patches of one picture."""
    return {"input_ids": torch.tensor([[5, *[49] * 16, 7, 8]]), "pixel_values": torch.randn(1, 3, 32, 32)}


def _patches() -> dict[str, Any]:
    """Six patches, each with its row and column in front, and some text."""
    places = torch.randint(1, 5, (2, 6, 2)).float()
    patches = torch.cat([places, torch.randn(2, 6, 16)], -1)
    return {"flattened_patches": patches, "decoder_input_ids": torch.randint(5, 50, (2, 5))}


def _clip(*towers: str) -> str:
    return f"""
        in {{{",".join(towers)}}}.encoder.layers.0
        q,k,v self_attn.{{q,k,v}}_proj : 32 32
        o     self_attn.out_proj     : 32 32
        mlp   mlp.fc1 > mlp.fc2      : 32 64 32"""


def _bert(*layers: str) -> str:
    return f"""
        in {{{",".join(layers)}}}
        q,k,v attention.self.{{query,key,value}}  : 32 32
        o     attention.output.dense            : 32 32
        mlp   intermediate.dense > output.dense : 32 64 32"""


_BOTH = _clip("text_model", "vision_model")
_GEGLU = "gated {0}.wi_0*{0}.wi_1 > {0}.wo : 32 64 32"

MODELS = [
    Model(
        name="hf CLIP, both towers",
        build=hf("CLIPModel", _pair, projection_dim=16, text_config=_READS | _SPECIAL, vision_config=_SEES),
        truth=_BOTH,
    ),
    Model(
        name="hf SigLIP, both towers",
        build=hf("SiglipModel", _pair, text_config=_READS | _SPECIAL, vision_config=_SEES),
        truth=_BOTH
        + """
        in vision_model.head
        k,v attention.{k,v}_proj : 32 32
        o   attention.out_proj   : 32 32 none
        mlp mlp.fc1 > mlp.fc2    : 32 64 32""",
    ),
    Model(
        name="hf OWL-ViT",
        build=hf("OwlViTModel", _masked_pair, projection_dim=16, text_config=_READS | _SPECIAL, vision_config=_SEES),
        truth=_BOTH,
    ),
    Model(
        name="hf AltCLIP",
        build=hf(
            "AltCLIPModel",
            _pair,
            projection_dim=16,
            text_config=_READS | {"project_dim": 16},
            vision_config=_SEES,
        ),
        truth=_clip("vision_model") + _bert("text_model.roberta.encoder.layers.0"),
    ),
    Model(
        name="hf BLIP",
        build=hf(
            "BlipModel",
            _pair,
            projection_dim=16,
            text_config=_READS | _SPECIAL | {"encoder_hidden_size": 32},
            vision_config=_SEES,
        ),
        # the cross attention is there and does not run
        truth=_bert("text_model.encoder.layer.0")
        + """
        in vision_model.encoder.layers.0
        qkv self_attn.qkv        : 32 96
        o   self_attn.projection : 32 32
        mlp mlp.fc1 > mlp.fc2    : 32 64 32""",
    ),
    Model(
        name="hf GIT",
        build=hf("GitModel", _pair, **SMALL, vocab_size=50, vision_config=_SEES),
        truth=_clip("image_encoder.vision_model") + _bert("encoder.layer.0", "encoder.layer.1"),
    ),
    Model(
        # it chooses the patches of each picture by itself
        name="hf ViLT",
        build=hf(
            "ViltModel",
            lambda: words(1) | pictures(batch=1),
            **SMALL,
            vocab_size=50,
            image_size=32,
            patch_size=8,
            max_position_embeddings=16,
            max_image_length=-1,
        ),
        truth="""
            in encoder.layer.#
            q,k,v attention.attention.{query,key,value} : 32 32
            o     attention.output.dense                : 32 32
            mlp   intermediate.dense > output.dense     : 32 64 32""",
    ),
    Model(
        name="hf VisualBERT",
        build=hf(
            "VisualBertModel",
            lambda: words() | {"visual_embeds": torch.randn(2, 3, 16)},
            **SMALL,
            vocab_size=50,
            visual_embedding_dim=16,
        ),
        truth=_bert("encoder.layer.0", "encoder.layer.1"),
    ),
    Model(
        name="hf LXMERT",
        build=hf(
            "LxmertModel",
            lambda: words() | {"visual_feats": torch.randn(2, 4, 16), "visual_pos": torch.rand(2, 4, 4)},
            vocab_size=50,
            hidden_size=32,
            num_attention_heads=4,
            intermediate_size=64,
            l_layers=1,
            x_layers=1,
            r_layers=1,
            visual_feat_dim=16,
        ),
        # visual_attention runs from text to picture and back, with different numbers of tokens: told as one call
        truth=_bert("encoder.layer.0", "encoder.r_layers.0")
        + """
        in encoder.x_layers.0
        q,k,v visual_attention.att.{query,key,value} : 32 32
        o     visual_attention.output.dense          : 32 32
        q,k,v {lang_self_att,visn_self_att}.self.{query,key,value} : 32 32
        o     {lang_self_att,visn_self_att}.output.dense           : 32 32
        mlp   lang_inter.dense > lang_output.dense   : 32 64 32
        mlp   visn_inter.dense > visn_output.dense   : 32 64 32""",
    ),
    Model(
        name="hf LLaVA",
        build=hf(
            "LlavaForConditionalGeneration",
            _picture_in_text,
            image_token_index=49,
            image_token_id=49,
            text_config={"model_type": "llama", **_ONE, "vocab_size": 50, "num_key_value_heads": 2},
            vision_config={"model_type": "clip_vision_model", **_SEES},
            vision_feature_layer=-1,
        ),
        # the projector is an MLP between two widths: nothing goes around it
        truth=_clip("model.vision_tower")
        + """
        in ~
        mlp model.multi_modal_projector.linear_1 > model.multi_modal_projector.linear_2 : 32 32 32 none
        in model.language_model.layers.0
        q   self_attn.q_proj     : 32 32
        k,v self_attn.{k,v}_proj : 32 16
        o   self_attn.o_proj     : 32 32
        gated mlp.gate_proj*mlp.up_proj > mlp.down_proj : 32 64 32""",
    ),
    Model(
        name="hf Pix2Struct",
        build=hf(
            "Pix2StructForConditionalGeneration",
            _patches,
            text_config={
                "vocab_size": 50,
                "hidden_size": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": 1,
                "num_heads": 4,
            },
            vision_config={
                "hidden_size": 32,
                "patch_embed_hidden_size": 16,
                "d_kv": 8,
                "d_ff": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "patch_size": 2,
                "num_channels": 4,
            },
        ),
        truth=f"""
            in encoder.encoder.layer.0
            q,k,v attention.{{query,key,value}} : 32 32
            o     attention.output            : 32 32
            {_GEGLU.format("mlp")}
            in decoder.layer.0
            q,k,v {{self_attention,encoder_decoder_attention}}.attention.{{query,key,value}} : 32 32
            o     {{self_attention,encoder_decoder_attention}}.attention.output            : 32 32
            {_GEGLU.format("mlp.DenseReluDense")}""",
    ),
]
