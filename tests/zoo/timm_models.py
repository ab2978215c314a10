"""timm's vision models."""

from __future__ import annotations

import functools

import torch
from torch import nn

from tests.zoo.entry import Build, Inputs, Model
from tests.zoo.makers import timm

_vit = functools.partial(timm, img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4)


def _blocks(*, hidden: int = 128, bypass: str = "bypass", blocks: str = "blocks.#") -> str:
    return f"""
        in {blocks}
        qkv attn.qkv          : 32 96
        o   attn.proj         : 32 32 {bypass}
        mlp mlp.fc1 > mlp.fc2 : 32 {hidden} 32 {bypass}"""


_PACKED_GLU = """
    in blocks.#
    qkv   attn.qkv  : 32 96
    o     attn.proj : 32 32
    gated mlp.fc1[0:85]*mlp.fc1[85:170] > mlp.fc2 : 32 85 32"""
_CLASS_ATTENTION = """
    in {0}.#
    q,k,v attn.{{q,k,v}}        : 32 32
    o     attn.proj         : 32 32
    mlp   mlp.fc1 > mlp.fc2 : 32 128 32"""


def _with_block(block: str) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        from timm.models import vision_transformer

        return _vit("vit_small_patch16_224", block_fn=getattr(vision_transformer, block))()

    return build


def _mixer(cls: str, **settings: object) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        from timm.models import mlp_mixer

        settings_of = {name: getattr(mlp_mixer, value) for name, value in settings.items() if isinstance(value, str)}
        model = getattr(mlp_mixer, cls)(
            img_size=32, patch_size=8, embed_dim=32, num_blocks=2, num_classes=10, **settings | settings_of
        )
        return model.eval(), torch.randn(2, 3, 32, 32)

    return build


MODELS = [
    Model(name="timm ViT", build=_vit("vit_tiny_patch16_224", mlp_ratio=2), truth=_blocks(hidden=64)),
    Model(
        name="timm ViT, layer scale, norms on q and k, drop path",
        build=_vit("vit_tiny_patch16_224", init_values=0.1, qk_norm=True, drop_path_rate=0.1),
        truth=_blocks(),
    ),
    Model(name="timm ViT, DINOv2 with registers", build=_vit("vit_base_patch14_reg4_dinov2"), truth=_blocks()),
    Model(name="timm ViT, DINOv2 giant, SwiGLU", build=_vit("vit_giant_patch14_dinov2"), truth=_PACKED_GLU),
    Model(name="timm ViT, relative positions", build=_vit("vit_relpos_small_patch16_224"), truth=_blocks()),
    Model(name="timm ViT, Segment Anything", build=_vit("samvit_base_patch16"), truth=_blocks()),
    Model(
        name="timm ViT, parallel scaling blocks",
        build=_with_block("ParallelScalingBlock"),
        # one matrix holds the first layer of the MLP and all three projections
        truth="o blocks.#.attn_out_proj : 32 32",
        skips={"blocks.0.in_proj": "packed"},
    ),
    Model(
        name="timm ViT, parallel blocks",
        build=_with_block("ParallelThingsBlock"),
        # the outputs of both are stacked and summed with the bypass
        truth="""
            qkv blocks.#.attns.{0,1}.attn.qkv  : 32 96
            o   blocks.#.attns.{0,1}.attn.proj : 32 32
            mlp blocks.#.ffns.{0,1}.mlp.fc1 > blocks.#.ffns.{0,1}.mlp.fc2 : 32 128 32""",
    ),
    Model(name="timm DeiT, distilled", build=_vit("deit_tiny_distilled_patch16_224"), truth=_blocks()),
    Model(name="timm DeiT III", build=_vit("deit3_small_patch16_224"), truth=_blocks()),
    # the bias of qkv is put together from three parameters in every forward
    Model(name="timm BEiT", build=_vit("beit_base_patch16_224"), truth=_blocks()),
    Model(
        name="timm EVA",
        build=_vit("eva_giant_patch14_224"),
        truth=_blocks(hidden=139),
    ),
    Model(name="timm EVA-02, packed SwiGLU", build=_vit("eva02_tiny_patch14_224"), truth=_PACKED_GLU),
    Model(
        name="timm EVA-02, a norm in the SwiGLU",
        build=_vit("eva02_base_patch14_224"),
        truth="""
            in blocks.#
            q,k,v attn.{q,k,v}_proj : 32 32
            o     attn.proj         : 32 32""",
        skips={"blocks.0.mlp.*": "norm over the hidden axis"},
    ),
    Model(
        name="timm CaiT",
        build=_vit("cait_xxs24_224"),
        # proj_l and proj_w mix the heads of the scores and stay dense; what goes around the first block's class
        # attention is the class token as it was learned
        truth=_blocks()
        + """
            in blocks_token_only.#
            q,k,v attn.{q,k,v}        : 32 32
            mlp   mlp.fc1 > mlp.fc2   : 32 128 32
            in ~
            o blocks_token_only.0.attn.proj : 32 32 none
            o blocks_token_only.1.attn.proj : 32 32""",
        uncounted="FlopCounterMode raises in a jit function",
    ),
    Model(
        name="timm XCiT",
        build=timm("xcit_nano_12_p16_224", img_size=32, patch_size=16, embed_dim=32, depth=2, num_heads=4),
        truth=_blocks() + _CLASS_ATTENTION.format("cls_attn_blocks"),
    ),
    Model(
        name="timm Mixer",
        build=_mixer("MlpMixer"),
        # mlp_tokens sees channels as tokens
        truth="""
            in blocks.#
            mlp mlp_tokens.fc1 > mlp_tokens.fc2     : 16 16 16
            mlp mlp_channels.fc1 > mlp_channels.fc2 : 32 128 32""",
    ),
    Model(
        name="timm ResMLP",
        build=_mixer("MlpMixer", mlp_ratio=4, block_layer="ResBlock", norm_layer="Affine"),
        # tokens are mixed by one linear
        truth="""
            in blocks.#
            mlp mlp_channels.fc1 > mlp_channels.fc2 : 32 128 32""",
    ),
    Model(
        name="timm gMLP",
        build=_mixer("MlpMixer", mlp_ratio=4, block_layer="SpatialGatingBlock", mlp_layer="GatedMlp"),
        # tokens are mixed between the linears
        truth="",
    ),
    Model(
        name="timm ConvNeXt",
        build=timm("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
        truth="""
            mlp stages.{0,1}.blocks.0.mlp.fc1 > stages.{0,1}.blocks.0.mlp.fc2 : 8 32 8
            mlp stages.{2,3}.blocks.0.mlp.fc1 > stages.{2,3}.blocks.0.mlp.fc2 : 16 64 16""",
    ),
    Model(
        name="timm ConvNeXt v2",
        build=timm("convnextv2_tiny", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
        # a response norm over all positions lies between the linears
        truth="",
        skips={"stages.0.blocks.0.mlp.fc1": "norm over the hidden axis"},
    ),
    Model(
        name="timm Swin",
        build=timm(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
        ),
        truth="""
            in layers.0.blocks.#
            qkv attn.qkv          : 16 48
            o   attn.proj         : 16 16
            mlp mlp.fc1 > mlp.fc2 : 16 64 16"""
        + _blocks(blocks="layers.1.blocks.#"),
    ),
    Model(
        name="timm Swin v2",
        build=timm(
            "swinv2_tiny_window8_256",
            img_size=32,
            window_size=4,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
        ),
        # a norm after every branch
        truth="""
            in layers.0.blocks.#
            qkv attn.qkv          : 16 48
            o   attn.proj         : 16 16 normed
            mlp mlp.fc1 > mlp.fc2 : 16 64 16 normed"""
        + _blocks(blocks="layers.1.blocks.#", bypass="normed"),
    ),
    Model(
        name="timm PVT v2",
        build=timm("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), num_heads=(1, 2, 2, 4)),
        # the MLPs hold a convolution
        truth="""
            in stages.0.blocks.0.attn
            q  q    : 8 8
            kv kv   : 8 16
            o  proj : 8 8
            in stages.{1,2}.blocks.0.attn
            q  q    : 16 16
            kv kv   : 16 32
            o  proj : 16 16
            in stages.3.blocks.0.attn
            q  q    : 32 32
            kv kv   : 32 64
            o  proj : 32 32""",
        skips={"stages.0.blocks.0.mlp.fc1": "op between the linears is not element-wise"},
    ),
    Model(
        name="timm Twins SVT",
        build=timm(
            "twins_svt_small",
            size=64,
            img_size=64,
            embed_dims=(8, 16, 16, 32),
            depths=(2, 2, 2, 2),
            num_heads=(1, 2, 2, 4),
        ),
        # local attention in windows, then global attention to a smaller map
        truth="""
            in blocks.0
            qkv 0.attn.qkv : 8 24
            q   1.attn.q   : 8 8
            kv  1.attn.kv  : 8 16
            o   {0,1}.attn.proj : 8 8
            mlp {0,1}.mlp.fc1 > {0,1}.mlp.fc2 : 8 32 8
            in blocks.{1,2}
            qkv 0.attn.qkv : 16 48
            q   1.attn.q   : 16 16
            kv  1.attn.kv  : 16 32
            o   {0,1}.attn.proj : 16 16
            mlp {0,1}.mlp.fc1 > {0,1}.mlp.fc2 : 16 64 16
            in blocks.3
            qkv 0.attn.qkv : 32 96
            q   1.attn.q   : 32 32
            kv  1.attn.kv  : 32 64
            o   {0,1}.attn.proj : 32 32
            mlp {0,1}.mlp.fc1 > {0,1}.mlp.fc2 : 32 128 32""",
    ),
    Model(
        name="timm CoaT-Lite",
        build=timm("coat_lite_tiny", img_size=32, embed_dims=(8, 16, 16, 16), serial_depths=(1, 1, 1, 1)),
        # attention without scores: softmax(k) is multiplied by v first
        truth="""
            in serial_blocks1.0
            qkv factoratt_crpe.qkv  : 8 24
            o   factoratt_crpe.proj : 8 8
            mlp mlp.fc1 > mlp.fc2   : 8 64 8
            in {serial_blocks2,serial_blocks3,serial_blocks4}.0
            qkv factoratt_crpe.qkv  : 16 48
            o   factoratt_crpe.proj : 16 16
            in ~
            mlp serial_blocks2.0.mlp.fc1 > serial_blocks2.0.mlp.fc2 : 16 128 16
            in {serial_blocks3,serial_blocks4}.0
            mlp mlp.fc1 > mlp.fc2   : 16 64 16""",
    ),
    Model(
        name="timm LeViT",
        build=timm("levit_128s", img_size=32, embed_dim=(16, 24, 32), depth=(1, 1, 1), num_heads=(2, 3, 4), key_dim=8),
        # every linear is followed by a batch norm, and attention's output by an activation
        truth="""
            qkv stages.0.blocks.0.attn.qkv.linear     : 16 64
            o   stages.0.blocks.0.attn.proj.ln.linear : 32 16 normed
            in stages.1.downsample.attn_downsample
            q  q.ln.linear    : 16 16
            kv kv.linear      : 16 80
            o  proj.ln.linear : 64 24 none
            in ~
            qkv stages.1.blocks.0.attn.qkv.linear     : 24 96
            o   stages.1.blocks.0.attn.proj.ln.linear : 48 24 normed
            in stages.2.downsample.attn_downsample
            q  q.ln.linear    : 24 24
            kv kv.linear      : 24 120
            o  proj.ln.linear : 96 32 none
            in ~
            qkv stages.2.blocks.0.attn.qkv.linear     : 32 128
            o   stages.2.blocks.0.attn.proj.ln.linear : 64 32 normed""",
        skips={"stages.0.blocks.0.mlp.*": "norm over the hidden axis"},
    ),
    Model(
        name="timm DaViT",
        build=timm("davit_tiny", depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), num_heads=(1, 2, 2, 4)),
        # windows of tokens, then groups of channels attend
        truth="""
            in stages.0.blocks.0.{0,1}
            qkv attn.qkv          : 8 24
            o   attn.proj         : 8 8
            mlp mlp.fc1 > mlp.fc2 : 8 32 8
            in {stages.1,stages.2}.blocks.0.{0,1}
            qkv attn.qkv          : 16 48
            o   attn.proj         : 16 16
            mlp mlp.fc1 > mlp.fc2 : 16 64 16
            in stages.3.blocks.0.{0,1}
            qkv attn.qkv          : 32 96
            o   attn.proj         : 32 32
            mlp mlp.fc1 > mlp.fc2 : 32 128 32""",
    ),
    Model(
        name="timm TNT",
        build=timm(
            "tnt_s_patch16_224",
            img_size=32,
            embed_dim=32,
            inner_dim=16,
            depth=2,
            num_heads_inner=2,
            num_heads_outer=4,
        ),
        truth="""
            in blocks.#
            qk  attn_in.qk              : 16 32
            v   attn_in.v               : 16 16
            o   attn_in.proj            : 16 16
            mlp mlp_in.fc1 > mlp_in.fc2 : 16 64 16
            qk  attn_out.qk             : 32 64
            v   attn_out.v              : 32 32
            o   attn_out.proj           : 32 32
            mlp mlp.fc1 > mlp.fc2       : 32 128 32""",
    ),
    Model(
        name="timm ConViT",
        build=timm("convit_tiny", img_size=32, embed_dim=8, depth=2, num_heads=4, local_up_to_layer=1),
        # the first block adds a softmax of positions to that of the scores
        truth="""
            qk  blocks.0.attn.qk   : 32 64
            v   blocks.0.attn.v    : 32 32
            qkv blocks.1.attn.qkv  : 32 96
            in blocks.#
            o   attn.proj          : 32 32
            mlp mlp.fc1 > mlp.fc2  : 32 128 32""",
    ),
    Model(
        name="timm EdgeNeXt",
        build=timm("edgenext_xx_small", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
        truth="""
            mlp stages.0.blocks.0.mlp.fc1 > stages.0.blocks.0.mlp.fc2 : 8 32 8
            in stages.{1,2}.blocks.0
            qkv xca.qkv           : 16 48
            o   xca.proj          : 16 16
            mlp mlp.fc1 > mlp.fc2 : 16 64 16
            in stages.3.blocks.0
            qkv xca.qkv           : 32 96
            o   xca.proj          : 32 32
            mlp mlp.fc1 > mlp.fc2 : 32 128 32""",
    ),
    Model(
        name="timm ConvNeXt, convolutions for MLPs",
        build=timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
        truth="",
        skips={"stages.0.blocks.0.mlp.fc1": "convolution"},
    ),
]
