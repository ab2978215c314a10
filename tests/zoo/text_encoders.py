"""transformers' text encoders."""

from __future__ import annotations

from tests.zoo.entry import Model
from tests.zoo.makers import hf, text, words

_LAYER = """
    q,k,v attention.self.{query,key,value}  : 32 32
    o     attention.output.dense            : 32 32
    mlp   intermediate.dense > output.dense : 32 64 32"""
BERT = f"in encoder.layer.#{_LAYER}"
_LLAMA = """
    in layers.#
    q,k,v self_attn.{q,k,v}_proj : 32 32
    o     self_attn.o_proj       : 32 32
    gated mlp.gate_proj*mlp.up_proj > mlp.down_proj : 32 64 32"""
_JIT = "FlopCounterMode raises in a jit function"
_TABLE = "neither a layer of an MLP nor a projection of attention"

MODELS = [
    Model(
        name="hf BERT",
        build=text("BertForMaskedLM"),
        truth=f"in bert.encoder.layer.#{_LAYER}",
    ),
    Model(name="hf RoBERTa", build=text("RobertaForMaskedLM"), truth=f"in roberta.encoder.layer.#{_LAYER}"),
    Model(name="hf RoBERTa pre-norm", build=text("RobertaPreLayerNormModel"), truth=BERT),
    Model(name="hf XLM-RoBERTa-XL", build=text("XLMRobertaXLModel"), truth=BERT),
    Model(name="hf ELECTRA", build=text("ElectraModel", embedding_size=16), truth=BERT),
    Model(name="hf RemBERT", build=text("RemBertModel", input_embedding_size=16, output_embedding_size=16), truth=BERT),
    Model(name="hf RoFormer", build=text("RoFormerModel", embedding_size=32), truth=BERT),
    Model(
        name="hf ESM",
        build=text("EsmModel", mask_token_id=4, position_embedding_type="rotary"),
        truth=BERT,
    ),
    Model(
        name="hf DeBERTa",
        build=text("DebertaModel", pos_att_type=["c2p", "p2c"], relative_attention=True, max_relative_positions=16),
        # pos_proj and pos_q_proj read a table of positions, not the text
        truth="""
            in encoder.layer.#
            qkv attention.self.in_proj            : 32 96
            o   attention.output.dense            : 32 32
            mlp intermediate.dense > output.dense : 32 64 32""",
        uncounted=_JIT,
    ),
    Model(
        name="hf DeBERTa-v2",
        build=text(
            "DebertaV2Model",
            pos_att_type=["c2p", "p2c"],
            relative_attention=True,
            max_relative_positions=16,
            share_att_key=True,
        ),
        # query_proj and key_proj are also applied to the table of relative positions
        truth="""
            in encoder.layer.#
            v   attention.self.value_proj         : 32 32
            o   attention.output.dense            : 32 32
            mlp intermediate.dense > output.dense : 32 64 32""",
        uncounted=_JIT,
    ),
    Model(
        name="hf MPNet",
        build=text("MPNetModel"),
        truth="""
            in encoder.layer.#
            q,k,v attention.attn.{q,k,v}            : 32 32
            o     attention.attn.o                  : 32 32
            mlp   intermediate.dense > output.dense : 32 64 32""",
    ),
    Model(
        name="hf ALBERT",
        build=text("AlbertModel", embedding_size=16),
        # one layer, called twice
        truth="""
            in encoder.albert_layer_groups.0.albert_layers.0
            q,k,v attention.{query,key,value} : 32 32 x2
            o     attention.dense             : 32 32 x2
            mlp   ffn > ffn_output            : 32 64 32 x2""",
    ),
    Model(
        name="hf DistilBERT",
        build=text("DistilBertModel", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
        truth="""
            in transformer.layer.#
            q,k,v attention.{q,k,v}_lin : 32 32
            o     attention.out_lin     : 32 32
            mlp   ffn.lin1 > ffn.lin2   : 32 64 32""",
    ),
    Model(
        name="hf ModernBERT",
        build=text(
            "ModernBertModel",
            global_attn_every_n_layers=2,
            local_attention=4,
            eos_token_id=1,
            bos_token_id=1,
            cls_token_id=1,
            sep_token_id=1,
        ),
        truth="""
            in layers.#
            qkv   attn.Wqkv : 32 96
            o     attn.Wo   : 32 32
            gated mlp.Wi[0:64]*mlp.Wi[64:128] > mlp.Wo : 32 64 32""",
    ),
    Model(name="hf NomicBERT", build=text("NomicBertModel"), truth=_LLAMA),
    Model(name="hf EuroBERT", build=text("EuroBertModel"), truth=_LLAMA),
    Model(
        name="hf Longformer",
        build=text("LongformerModel", attention_window=4),
        # the *_global linears run only where a token attends globally
        truth=BERT,
    ),
    Model(name="hf BigBird", build=text("BigBirdModel", attention_type="original_full"), truth=BERT),
    Model(
        name="hf Nystromformer",
        build=text("NystromformerModel", num_landmarks=7, segment_means_seq_len=7),
        truth=BERT,
    ),
    Model(
        name="hf Funnel",
        build=hf(
            "FunnelModel",
            words,
            vocab_size=50,
            pad_token_id=0,
            block_sizes=[1, 1],
            d_model=32,
            n_head=4,
            d_head=8,
            d_inner=64,
            num_decoder_layers=1,
        ),
        # in the second block the queries are pooled: the bypass is pooled too
        truth="""
            in {encoder.blocks.0.0,encoder.blocks.1.0,decoder.layers.0}
            q attention.q_head : 32 32
            k attention.k_head : 32 32
            v attention.v_head : 32 32
            o attention.post_proj : 32 32
            mlp ffn.linear_1 > ffn.linear_2 : 32 64 32""",
    ),
    Model(
        name="hf ConvBERT",
        build=text("ConvBertModel", embedding_size=32),
        # half of the heads are convolutions whose kernels are softmaxed: conv_out_layer holds their values
        truth="""
            in encoder.layer.#
            q,k,v attention.self.{query,key,value}  : 32 16
            v     attention.self.conv_out_layer     : 32 16
            o     attention.output.dense            : 32 32
            mlp   intermediate.dense > output.dense : 32 64 32""",
    ),
    Model(
        name="hf FNet",
        build=text("FNetModel"),
        truth="""
            in encoder.layer.#
            mlp intermediate.dense > output.dense : 32 64 32""",
    ),
    Model(
        name="hf XLNet",
        build=text("XLNetModel", d_model=32, n_layer=2, n_head=4, d_inner=64),
        # the projections are einsums over weights of three dimensions
        truth="""
            in layer.#
            mlp ff.layer_1 > ff.layer_2 : 32 64 32""",
        skips={"layer.0.rel_attn.q": "attention q: its einsum weight has 3 dimensions"},
    ),
    Model(
        name="hf MobileBERT",
        build=text("MobileBertModel", embedding_size=16, intra_bottleneck_size=16, hidden_size=32, true_hidden_size=16),
        # what the output projection is added to is another projection of the block's input
        truth="""
            in encoder.layer.#
            q,k attention.self.{query,key}        : 16 16
            v   attention.self.value              : 32 16
            o   attention.output.dense            : 16 16 none
            mlp intermediate.dense > output.dense : 16 64 16
            in encoder.layer.#.ffn.{0,1,2}
            mlp intermediate.dense > output.dense : 16 64 16""",
        skips={"encoder.layer.0.bottleneck.*": _TABLE},
    ),
    Model(
        name="hf SqueezeBERT",
        build=text("SqueezeBertModel", embedding_size=32),
        truth="",
        skips={"encoder.layers.0.*": "convolution"},
    ),
    Model(name="hf I-BERT", build=text("IBertModel"), truth=BERT),
    Model(
        name="hf XLM",
        build=text("XLMModel", emb_dim=32, n_layers=2, n_heads=4),
        truth="""
            q,k,v attentions.#.{q,k,v}_lin    : 32 32
            o     attentions.#.out_lin        : 32 32
            mlp   ffns.#.lin1 > ffns.#.lin2   : 32 128 32""",
    ),
]
