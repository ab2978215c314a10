"""LoRA (peft) on a converted model: adapters follow the original at all budgets, then merge into the learners."""

import copy
import random

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import acm_compiler as acm
import acm_compiler.hf  # from here on, `target_modules` may name sites

sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
original = LlamaForCausalLM(LlamaConfig(vocab_size=500, initializer_range=0.2, **sizes)).eval()
batches = [{"input_ids": torch.randint(500, (8, 16))} for _ in range(16)]
model = acm.rewrite(original, acm.plan(original, batches[0], sites="mlp"))
acm.calibrate(model, batches, tokens=1_000, budgets=[0.25])


def distance(model, batch):
    with torch.no_grad():
        expected = original(**batch).logits.log_softmax(-1)
    return torch.nn.functional.kl_div(model(**batch).logits.log_softmax(-1), expected, log_target=True)


model_before = copy.deepcopy(model)
adapted = get_peft_model(model, LoraConfig(target_modules=list(acm.sites(model)), r=4, lora_alpha=4))
adapted.print_trainable_parameters()
optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=3e-3)
for step in range(60):
    acm.set_budget(adapted, random.uniform(0.25, 0.8))  # one adapter for every budget
    distance(adapted, batches[step % 12]).backward()
    optimizer.step()
    optimizer.zero_grad()
adapted.save_pretrained("adapter")  # 20 kB; PeftModel.from_pretrained(model, "adapter") has it back

healed = adapted.merge_and_unload()  # learners again: fast, every k valid, and acm.save takes it
acm.recalibrate(healed, batches, tokens=1_000, budgets=[0.25])
for budget in (0.25, 0.5, 1.0):
    for each in (model_before, healed):
        acm.set_budget(each, budget)
    with torch.no_grad():
        before, after = (float(distance(each, batches[-1])) for each in (model_before, healed))
    print(f"budget {budget}: distance to the original {before:.2e}, with LoRA {after:.2e}")
