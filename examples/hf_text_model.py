"""A text encoder of transformers, with padding; tiny and random, so that nothing is downloaded."""

import torch
from transformers import AutoModel, BertConfig, BertModel

import acm_compiler as acm
import acm_compiler.hf  # lets from_pretrained read what acm.save wrote


def texts(count, length=24):
    """Batches as a tokenizer gives them: token numbers, and a mask that is 0 at padding."""
    lengths = torch.randint(6, length + 1, (count,))
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": torch.randint(1, 500, (count, length)) * mask, "attention_mask": mask}


def pooled(output, mask):
    """The mean over real tokens: what this model is used for, and so what its conversion is judged by."""
    hidden = output.last_hidden_state
    if mask is None:
        return hidden.mean(1)
    weight = mask[..., None].to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


config = BertConfig(
    vocab_size=500,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=256,
    initializer_range=0.1,
)
original = BertModel(config).eval()  # AutoModel.from_pretrained(...) of your own
batches = [texts(8) for _ in range(24)]

plan = acm.plan(original, batches[0], sites="mlp")
model = acm.rewrite(original, plan)
acm.calibrate(model, batches, tokens=1_500, answer=pooled)  # padding is what each batch's attention_mask says
print(acm.sensitivity(model))

x = batches[0]
mask = x["attention_mask"].bool()
with torch.no_grad():
    dense = pooled(original(**x), mask)
    for budget in (0.4, 0.7, 1.0):
        acm.set_budget(model, budget)
        with acm.record(model) as usage:
            similarity = torch.cosine_similarity(pooled(model(**x), mask), dense).mean()
        print(f"budget {usage.budget:.2f}: cosine to the dense model's vectors {similarity:.3f}")

acm.save(model, "converted/")
again = AutoModel.from_pretrained("converted/")  # the same as acm.load("converted/")
acm.set_budget(again, 0.7)
