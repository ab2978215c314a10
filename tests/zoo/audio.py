"""transformers' audio models."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.entry import Build, Model
from tests.zoo.makers import SMALL, hf, waves

_FRONT = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def _wave(cls: str, **settings: Any) -> Build:
    """A model over two convolutions and two blocks of width 32."""
    return hf(cls, waves, **SMALL | _FRONT | settings)


def _layers(prefix: str = "") -> str:
    return f"""
        in {prefix}encoder.layers.#
        q,k,v attention.{{q,k,v}}_proj : 32 32
        o     attention.out_proj     : 32 32
        mlp   feed_forward.intermediate_dense > feed_forward.output_dense : 32 64 32"""


_CONFORMER = """
    in encoder.layers.#
    mlp   {ffn1,ffn2}.intermediate_dense > {ffn1,ffn2}.output_dense : 32 64 32
    q,k,v self_attn.linear_{q,k,v} : 32 32
    o     self_attn.linear_out     : 32 32"""
_SPEECH_DECODER = """
    in model.encoder.layers.#
    q,k,v self_attn.{q,k,v}_proj : 32 32
    o     self_attn.out_proj     : 32 32
    mlp   fc1 > fc2              : 32 64 32
    in model.decoder.layers.#
    q,k,v {self_attn,encoder_attn}.{q,k,v}_proj : 32 32
    o     {self_attn,encoder_attn}.out_proj     : 32 32
    mlp   fc1 > fc2                             : 32 64 32"""


def _features(frames: int, size: int) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, frames, size), "decoder_input_ids": torch.randint(5, 50, (2, 5))}


MODELS = [
    Model(name="hf wav2vec 2.0", build=_wave("Wav2Vec2ForCTC", vocab_size=30), truth=_layers("wav2vec2.")),
    Model(
        name="hf wav2vec 2.0, pre-norm",
        build=_wave("Wav2Vec2ForCTC", vocab_size=30, do_stable_layer_norm=True, feat_extract_norm="layer"),
        truth=_layers("wav2vec2."),
    ),
    Model(name="hf HuBERT", build=_wave("HubertModel"), truth=_layers()),
    Model(name="hf UniSpeech", build=_wave("UniSpeechModel"), truth=_layers()),
    Model(name="hf SEW", build=_wave("SEWModel", squeeze_factor=2), truth=_layers()),
    Model(
        name="hf SEW-D",
        build=_wave(
            "SEWDModel",
            squeeze_factor=2,
            max_position_embeddings=64,
            position_buckets=-1,
            max_relative_positions=-1,
        ),
        # as in DeBERTa-v2, query_proj and key_proj are also applied to the table of relative positions
        truth="""
            in encoder.encoder.layer.#
            v   attention.self.value_proj         : 32 32
            o   attention.output.dense            : 32 32
            mlp intermediate.dense > output.dense : 32 64 32""",
    ),
    Model(
        name="hf WavLM",
        build=_wave("WavLMModel", num_buckets=8, max_bucket_distance=16),
        # attention is one call of torch's multi_head_attention_forward with the weights as arguments
        truth="""
            in encoder.layers.#
            mlp feed_forward.intermediate_dense > feed_forward.output_dense : 32 64 32""",
        skips={"*multi_head_attention_forward*": "opaque call"},
    ),
    Model(
        name="hf Data2Vec audio",
        build=_wave("Data2VecAudioModel", conv_pos_kernel_size=3, num_conv_pos_embeddings=2),
        truth=_layers(),
    ),
    Model(
        name="hf wav2vec 2.0 conformer",
        build=_wave("Wav2Vec2ConformerModel", conv_depthwise_kernel_size=3),
        # each MLP counts half; linear_pos reads positions, the convolution module holds no linear
        truth=_CONFORMER,
    ),
    Model(
        name="hf wav2vec 2.0 BERT",
        build=hf(
            "Wav2Vec2BertModel",
            lambda: {"input_features": torch.randn(2, 12, 16)},
            feature_projection_input_dim=16,
            conv_depthwise_kernel_size=3,
            left_max_position_embeddings=4,
            right_max_position_embeddings=2,
            **SMALL,
        ),
        truth=_CONFORMER,
    ),
    Model(
        name="hf Audio Spectrogram Transformer",
        build=hf(
            "ASTModel",
            lambda: {"input_values": torch.randn(2, 24, 16)},
            patch_size=8,
            frequency_stride=8,
            time_stride=8,
            max_length=24,
            num_mel_bins=16,
            **SMALL,
        ),
        truth="""
            in layers.#
            q,k,v attention.{q,k,v}_proj : 32 32
            o     attention.o_proj       : 32 32
            mlp   mlp.fc1 > mlp.fc2      : 32 64 32""",
    ),
    Model(
        name="hf Whisper",
        build=hf(
            "WhisperForConditionalGeneration",
            lambda: _features(8, 20),
            vocab_size=50,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=10,
            max_target_positions=12,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        truth=_SPEECH_DECODER,
    ),
    Model(
        name="hf Speech2Text",
        build=hf(
            "Speech2TextForConditionalGeneration",
            lambda: _features(20, 8),
            vocab_size=50,
            input_feat_per_channel=8,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            conv_channels=16,
        ),
        blocks=1,
        truth=_SPEECH_DECODER,
    ),
    Model(
        name="hf Moonshine",
        build=hf(
            "MoonshineForConditionalGeneration",
            lambda: {"input_values": torch.randn(2, 3000), "decoder_input_ids": torch.randint(5, 50, (2, 5))},
            vocab_size=50,
            hidden_size=32,
            intermediate_size=64,
            encoder_num_hidden_layers=1,
            decoder_num_hidden_layers=1,
            encoder_num_attention_heads=4,
            decoder_num_attention_heads=4,
        ),
        # the decoder's MLP is gated, its second half activated
        truth="""
            in model.encoder.layers.0
            q,k,v self_attn.{q,k,v}_proj : 32 32
            o     self_attn.o_proj       : 32 32
            mlp   mlp.fc1 > mlp.fc2      : 32 64 32
            in model.decoder.layers.0
            q,k,v {self_attn,encoder_attn}.{q,k,v}_proj : 32 32
            o     {self_attn,encoder_attn}.o_proj       : 32 32
            gated mlp.fc1[64:128]*mlp.fc1[0:64] > mlp.fc2 : 32 64 32""",
    ),
]
