"""transformers' encoder-decoders for text."""

from __future__ import annotations

from typing import Any

from tests.zoo.entry import Build, Model
from tests.zoo.makers import hf, word_pairs


def _t5(cls: str, **settings: Any) -> Build:
    shape = {"vocab_size": 50, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    return hf(cls, word_pairs, **shape, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **settings)


def _bart(cls: str, **settings: Any) -> Build:
    shape = {
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    return hf(
        cls,
        word_pairs,
        **shape,
        d_model=32,
        max_position_embeddings=32,
        **{"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | settings,
    )


def _t5_truth(mlp: str, *, first: str = "SelfAttention") -> str:
    return f"""
        in encoder.block.#.layer
        q,k,v 0.{first}.{{q,k,v}} : 32 32
        o     0.{first}.o       : 32 32
        {mlp.replace("@", "1.DenseReluDense")}
        in decoder.block.#.layer
        q,k,v {{0.SelfAttention,1.EncDecAttention}}.{{q,k,v}} : 32 32
        o     {{0.SelfAttention,1.EncDecAttention}}.o       : 32 32
        {mlp.replace("@", "2.DenseReluDense")}"""


_RELU = "mlp @.wi > @.wo : 32 64 32"
_GEGLU = "gated @.wi_0*@.wi_1 > @.wo : 32 64 32"
_BART = """
    in model.encoder.layers.#
    q,k,v self_attn.{q,k,v}_proj : 32 32
    o     self_attn.out_proj     : 32 32
    mlp   fc1 > fc2              : 32 64 32
    in model.decoder.layers.#
    q,k,v {self_attn,encoder_attn}.{q,k,v}_proj : 32 32
    o     {self_attn,encoder_attn}.out_proj     : 32 32
    mlp   fc1 > fc2                             : 32 64 32"""

MODELS = [
    Model(name="hf T5", build=_t5("T5ForConditionalGeneration"), truth=_t5_truth(_RELU)),
    Model(
        name="hf T5, gated",
        build=_t5("T5ForConditionalGeneration", feed_forward_proj="gated-gelu"),
        truth=_t5_truth(_GEGLU),
    ),
    Model(name="hf UMT5", build=_t5("UMT5ForConditionalGeneration"), truth=_t5_truth(_GEGLU)),
    Model(
        name="hf LongT5",
        build=_t5("LongT5ForConditionalGeneration", local_radius=3),
        truth=_t5_truth(_RELU, first="LocalSelfAttention"),
    ),
    Model(name="hf BART", build=_bart("BartForConditionalGeneration", decoder_start_token_id=1), truth=_BART),
    Model(name="hf Marian", build=_bart("MarianMTModel", decoder_start_token_id=1), truth=_BART),
    Model(name="hf Pegasus", build=_bart("PegasusForConditionalGeneration", decoder_start_token_id=1), truth=_BART),
    Model(name="hf M2M-100", build=_bart("M2M100ForConditionalGeneration", decoder_start_token_id=1), truth=_BART),
    Model(
        name="hf FSMT",
        build=_bart(
            "FSMTForConditionalGeneration", langs=["a", "b"], src_vocab_size=50, tgt_vocab_size=50, vocab_size=50
        ),
        truth=_BART,
    ),
    Model(
        name="hf ProphetNet",
        build=hf(
            "ProphetNetForConditionalGeneration",
            word_pairs,
            vocab_size=50,
            hidden_size=32,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_encoder_attention_heads=4,
            num_decoder_attention_heads=4,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        # relative_pos_embeddings makes a bias of the scores
        truth="""
            in prophetnet.encoder.layers.#
            q,k,v self_attn.{query,key,value}_proj : 32 32
            o     self_attn.out_proj               : 32 32
            mlp   feed_forward.intermediate > feed_forward.output : 32 64 32
            in prophetnet.decoder.layers.#
            q,k,v {self_attn,cross_attn}.{query,key,value}_proj : 32 32
            o     {self_attn,cross_attn}.out_proj               : 32 32
            mlp   feed_forward.intermediate > feed_forward.output : 32 64 32""",
    ),
]
