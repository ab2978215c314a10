"""LoRA (peft): merge the adapters into the weights first, then convert."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import acm_compiler as acm

config = BertConfig(vocab_size=500, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
base = BertForSequenceClassification(config)
adapted = get_peft_model(base, LoraConfig(target_modules="all-linear", r=4, lora_alpha=8, init_lora_weights=False))
# ... train the adapters here ...

merged = adapted.merge_and_unload().eval()  # plain weights again: what a plan is made for
batches = [{"input_ids": torch.randint(500, (8, 16))} for _ in range(16)]
model = acm.rewrite(merged, acm.plan(merged, batches[0]))
acm.calibrate(model, batches, tokens=1_000)
acm.set_budget(model, 0.6)
with torch.no_grad():
    difference = (model(**batches[0]).logits - merged(**batches[0]).logits).norm() / merged(**batches[0]).logits.norm()
print(f"relative difference of the logits at budget 0.6: {difference:.3f}")
