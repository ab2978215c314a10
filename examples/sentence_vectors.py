"""sentence-transformers: convert the transformer inside, keep `encode`; tiny and random, nothing is downloaded."""

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import acm_compiler as acm

WORDS = (
    "gate",
    "learner",
    "budget",
    "model",
    "token",
    "runs",
    "costs",
    "reads",
    "every",
    "some",
    "few",
    "fast",
    "slow",
)

# in place of SentenceTransformer("all-MiniLM-L6-v2"): a random model in a folder of its own
vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained("tiny/")
config = BertConfig(
    vocab_size=len(vocabulary),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=256,
    initializer_range=0.1,
)
BertModel(config).save_pretrained("tiny/")
transformer = Transformer("tiny/", max_seq_length=32)
encoder = SentenceTransformer(modules=[transformer, Pooling(64, pooling_mode="mean")], device="cpu")

sentences = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 5 + i % 9)) for i in range(160)]
before = encoder.encode(sentences[:16], convert_to_tensor=True)


def pooled(output, mask):
    """The mean over real tokens, of length 1: what `encode` makes of the transformer's output."""
    hidden = output.last_hidden_state
    weight = torch.ones_like(hidden[..., :1]) if mask is None else mask[..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)


inner = encoder[0].auto_model.eval()
batches = [dict(encoder.tokenizer(sentences[i : i + 8], padding=True, return_tensors="pt")) for i in range(0, 160, 8)]
batches = [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in batches]
acm.rewrite(inner, acm.plan(inner, batches[0], sites="mlp"), inplace=True)  # the encoder holds this very module
acm.calibrate(inner, batches, tokens=800, answer=pooled)

for budget in (0.5, 1.0):
    acm.set_budget(inner, budget)
    vectors = encoder.encode(sentences[:16], convert_to_tensor=True)
    print(f"budget {budget}: cosine {torch.cosine_similarity(vectors, before).mean():.3f}")
