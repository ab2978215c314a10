"""transformers' vision models."""

from __future__ import annotations

import functools

import torch

from tests.zoo.entry import Model
from tests.zoo.makers import SMALL, hf, pictures

_PICTURE = functools.partial(hf, **SMALL, image_size=32, patch_size=8)
_NO_WIDTH = {key: value for key, value in SMALL.items() if key != "intermediate_size"}


def _vit(blocks: str = "layers.#", *, bypass: str = "bypass") -> str:
    return f"""
        in {blocks}
        q,k,v attention.{{q,k,v}}_proj : 32 32
        o     attention.o_proj       : 32 32 {bypass}
        mlp   mlp.fc1 > mlp.fc2      : 32 64 32 {bypass}"""


def _gated(blocks: str, mlp: str, *, hidden: int = 64, o: str = "o_proj") -> str:
    return f"""
        in {blocks}
        q,k,v attention.{{q,k,v}}_proj : 32 32
        o     attention.{o}          : 32 32
        gated {mlp}.gate_proj*{mlp}.up_proj > {mlp}.down_proj : 32 {hidden} 32"""


_CLIP = """
    in encoder.layers.#
    q,k,v self_attn.{q,k,v}_proj : 32 32
    o     self_attn.out_proj     : 32 32
    mlp   mlp.fc1 > mlp.fc2      : 32 64 32"""
_BERT_LIKE = """
    in encoder.layer.#
    q,k,v attention.attention.{query,key,value} : 32 32
    o     attention.output.dense                : 32 32
    mlp   intermediate.dense > output.dense     : 32 64 32"""


def _stage(prefix: str, width: int, *, hidden: int | None = None, attention: str, o: str, mlp: str = "") -> str:
    text = f"""
        in {prefix}
        q,k,v {attention} : {width} {width}
        o     {o} : {width} {width}"""
    return text + (f"\n        mlp {mlp} : {width} {hidden} {width}" if hidden else "")


def _film(frames: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, frames, 3, 32, 32)}


MODELS = [
    Model(name="hf ViT", build=_PICTURE("ViTModel", pictures), truth=_vit(), skips={"pooler.dense": "classifier"}),
    Model(name="hf DeiT", build=_PICTURE("DeiTModel", pictures), truth=_vit()),
    Model(name="hf ViT-MAE", build=_PICTURE("ViTMAEModel", pictures), truth=_vit()),
    Model(name="hf BEiT", build=_PICTURE("BeitModel", pictures), truth=_vit()),
    Model(name="hf DINOv2", build=_PICTURE("Dinov2Model", pictures, mlp_ratio=2), truth=_vit("encoder.layer.#")),
    Model(
        name="hf DINOv2, SwiGLU",
        build=_PICTURE("Dinov2Model", pictures, mlp_ratio=2, use_swiglu_ffn=True),
        truth=_gated("encoder.layer.#", "mlp", hidden=48),
    ),
    Model(
        name="hf DINOv3",
        build=_PICTURE("DINOv3ViTModel", pictures, use_gated_mlp=True),
        truth=_gated("model.layer.#", "mlp"),
    ),
    Model(
        name="hf SigLIP",
        build=_PICTURE("SiglipVisionModel", pictures),
        # the pooling head's queries are a parameter, so that its output has nothing to be added to
        truth=_CLIP
        + """
        in head
        k,v attention.{k,v}_proj : 32 32
        o   attention.out_proj   : 32 32 none
        mlp mlp.fc1 > mlp.fc2    : 32 64 32""",
    ),
    Model(name="hf CLIP", build=_PICTURE("CLIPVisionModel", pictures), truth=_CLIP),
    Model(
        name="hf AIMv2",
        build=_PICTURE("Aimv2VisionModel", pictures),
        truth=_gated("encoder.layers.#", "ffn", o="out_proj")
        + """
        in head
        k,v {k,v}_proj  : 32 32
        o   output_proj : 32 32 none""",
    ),
    Model(
        name="hf Pixtral",
        # the patches of all pictures lie in one row: a plan of it is for one picture at a time
        build=_PICTURE("PixtralVisionModel", lambda: pictures(batch=1)),
        truth=_gated("transformer.layers.#", "feed_forward"),
    ),
    Model(
        name="hf Swin",
        build=hf(
            "SwinModel",
            pictures,
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        truth="".join(
            _stage(
                f"encoder.layers.{stage}.blocks.#",
                width,
                hidden=4 * width,
                attention="attention.{q,k,v}_proj",
                o="attention.o_proj",
                mlp="mlp.fc1 > mlp.fc2",
            )
            for stage, width in ((0, 16), (1, 32))
        ),
    ),
    Model(
        name="hf Swin v2",
        build=hf(
            "Swinv2Model",
            pictures,
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        # a norm after every branch; the position bias comes from a table of coordinates, not from the picture
        truth="".join(
            f"""
            in encoder.layers.{stage}.blocks.#
            q,k,v attention.self.{{query,key,value}}  : {width} {width}
            o     attention.output.dense            : {width} {width} normed
            mlp   intermediate.dense > output.dense : {width} {4 * width} {width} normed"""
            for stage, width in ((0, 16), (1, 32))
        ),
    ),
    Model(
        name="hf ConvNeXt",
        build=hf("ConvNextModel", pictures, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1]),
        truth="""
            mlp encoder.stages.0.layers.0.pwconv1 > encoder.stages.0.layers.0.pwconv2 : 8 32 8
            in encoder.stages.{1.layers.0,2.layers.0,2.layers.1}
            mlp pwconv1 > pwconv2 : 16 64 16
            in encoder.stages.3.layers.0
            mlp pwconv1 > pwconv2 : 32 128 32""",
    ),
    Model(
        name="hf ConvNeXt v2",
        build=hf("ConvNextV2Model", pictures, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1]),
        truth="",
        skips={"encoder.stages.0.layers.0.pwconv1": "norm over the hidden axis"},
    ),
    Model(
        name="hf SegFormer",
        build=hf(
            "SegformerModel",
            pictures,
            hidden_sizes=[8, 16, 16, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 4],
            sr_ratios=[4, 2, 2, 1],
        ),
        # the MLPs hold a convolution
        truth="".join(
            _stage(f"stages.{stage}.blocks.0", width, attention="attention.{q,k,v}_proj", o="attention.o_proj")
            for stage, width in enumerate((8, 16, 16, 32))
        ),
        skips={"stages.0.blocks.0.mlp.fc1": "op between the linears is not element-wise"},
    ),
    Model(
        name="hf PVT",
        build=hf(
            "PvtModel",
            pictures,
            image_size=32,
            hidden_sizes=[8, 16, 16, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 4],
            sequence_reduction_ratios=[2, 1, 1, 1],
        ),
        truth="".join(
            _stage(
                f"encoder.block.{stage}.0",
                width,
                hidden=hidden,
                attention="attention.self.{query,key,value}",
                o="attention.output.dense",
                mlp="mlp.dense1 > mlp.dense2",
            )
            for stage, (width, hidden) in enumerate(((8, 64), (16, 128), (16, 64), (32, 128)))
        ),
    ),
    Model(
        name="hf FocalNet",
        build=hf(
            "FocalNetModel",
            pictures,
            image_size=32,
            embed_dim=16,
            depths=[1, 1],
            hidden_sizes=[16, 32],
            focal_levels=[2, 2],
            focal_windows=[3, 3],
        ),
        # between the linears of a modulation lie convolutions
        truth="""
            in encoder.stages.0.layers.0
            mlp mlp.fc1 > mlp.fc2 : 16 64 16
            in encoder.stages.1.layers.0
            mlp mlp.fc1 > mlp.fc2 : 32 128 32""",
    ),
    Model(
        name="hf YOLOS",
        build=hf("YolosModel", pictures, **SMALL, image_size=[32, 32], patch_size=8, num_detection_tokens=3),
        truth=_BERT_LIKE,
    ),
    Model(name="hf DPT", build=_PICTURE("DPTModel", pictures), truth=_BERT_LIKE),
    Model(
        name="hf VideoMAE",
        build=_PICTURE("VideoMAEModel", functools.partial(_film, 4), num_frames=4),
        truth=_BERT_LIKE,
    ),
    Model(
        name="hf ViViT",
        build=hf(
            "VivitModel",
            functools.partial(_film, 2),
            **SMALL,
            image_size=32,
            num_frames=2,
            tubelet_size=[2, 8, 8],
        ),
        truth=_vit(),
    ),
    Model(
        name="hf SAM",
        build=hf(
            "SamVisionModel",
            pictures,
            **_NO_WIDTH,
            image_size=32,
            patch_size=8,
            window_size=2,
            global_attn_indexes=[1],
            output_channels=16,
            mlp_dim=64,
        ),
        truth="""
            in vision_encoder.layers.#
            qkv attn.qkv            : 32 96
            o   attn.proj           : 32 32
            mlp mlp.lin1 > mlp.lin2 : 32 64 32""",
    ),
    Model(
        name="hf ViTDet",
        build=hf(
            "VitDetModel",
            pictures,
            **_NO_WIDTH,
            image_size=32,
            patch_size=8,
            window_block_indices=[0],
            window_size=2,
        ),
        truth="""
            in encoder.layer.#
            qkv attention.qkv     : 32 96
            o   attention.proj    : 32 32
            mlp mlp.fc1 > mlp.fc2 : 32 128 32""",
    ),
]
