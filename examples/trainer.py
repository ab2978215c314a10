"""transformers.Trainer: finetune a converted model at a budget, with the three terms in compute_loss."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import acm_compiler as acm

BUDGET = 0.5


class AcmTrainer(Trainer):
    """A Trainer whose loss has the terms that lead the gates to a budget."""

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        if model.training:
            extra = acm.losses(model, budget=BUDGET)  # what attention_mask calls padding counts in no term
            loss = loss + 0.1 * extra["budget"] + 0.05 * (extra["entropy"] + extra["diversity"])
        return (loss, outputs) if return_outputs else loss


def text(label, length=16):
    """One example: token numbers from its class's part of the vocabulary."""
    real = int(torch.randint(6, length + 1, ()))
    ids = torch.randint(1 + 100 * label, 101 + 100 * label, (length,))
    mask = (torch.arange(length) < real).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": label}


config = BertConfig(
    vocab_size=500, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, num_labels=4
)
original = BertForSequenceClassification(config).eval()
data = [text(i % 4) for i in range(128)]
inputs = {name: torch.stack([example[name] for example in data]) for name in ("input_ids", "attention_mask")}
batches = [{name: tensor[i : i + 16] for name, tensor in inputs.items()} for i in range(0, 128, 16)]

model = acm.rewrite(original, acm.plan(original, batches[0], sites="mlp"))
acm.calibrate(model, batches, tokens=800, budgets=[BUDGET])
acm.set_budget(model, BUDGET)  # where the gates start from
acm.relax(model, temperature=0.8)

arguments = TrainingArguments(
    output_dir="trainer/",
    per_device_train_batch_size=16,
    max_steps=8,
    learning_rate=1e-3,
    save_strategy="steps",
    save_steps=4,  # checkpoints are folders of acm.load; train(resume_from_checkpoint=...) continues from one
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
AcmTrainer(model=model, args=arguments, train_dataset=data).train()

acm.relax(model.eval(), None)
acm.recalibrate(model, batches, tokens=800)
acm.set_budget(model, BUDGET)
acm.save(model, "converted/")
print(acm.status(model))
checkpoint = acm.load("trainer/checkpoint-8")
