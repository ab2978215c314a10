"""Small decoders of transformers with drawn weights, whose budgets change what they write."""

import torch

import acm_compiler as acm
from acm_compiler.runtime.measure_budgets import measure_budgets

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 60}


def llama(**options):
    """A Llama of two layers, in eval mode, that never ends a text by itself."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES | options, eos_token_id=None, pad_token_id=0, initializer_range=0.4, max_position_embeddings=256
    )
    return transformers.LlamaForCausalLM(config).eval()


def mixture():
    """A mixture of experts, of which a shared one takes all tokens of a call in one axis."""
    import transformers

    torch.manual_seed(0)
    experts = {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 64,
        "num_experts": 2,
        "num_key_value_heads": 2,
    }
    config = transformers.Qwen2MoeConfig(
        **SIZES | experts, num_experts_per_tok=1, eos_token_id=None, pad_token_id=0, initializer_range=0.4
    )
    return transformers.Qwen2MoeForCausalLM(config).eval()


def drawn(*shape):
    """Token ids, other than that of padding; the same for the same shape."""
    return torch.randint(1, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(sum(shape)))


def gated(model, inputs, *batches, lossless=False, sites="mlp"):
    """The model with drawn gates, and learners that change what it writes where they are few."""
    plan = acm.plan(model, inputs, sites=sites, lossless=lossless, init="auto" if lossless else "random")
    converted = acm.rewrite(model, plan)
    if lossless:
        acm.calibrate(converted, batches, tokens=400)
    with torch.no_grad():
        for site in acm.sites(converted).values():
            parts = site.gate.parameters() if lossless else (*site.gate.parameters(), *site.learners.parameters())
            for parameter in parts:
                parameter.copy_(torch.randn_like(parameter) * 0.4)
    measure_budgets(converted, [(batch, None) for batch in batches])
    return converted


def gated_llama(sites="mlp", **options):
    """`llama` with gates and a measured table of budgets."""
    inputs, batch = {"input_ids": torch.ones(1, 9, dtype=torch.int64)}, {"input_ids": drawn(8, 20)}
    return gated(llama(**options), inputs, batch, sites=sites)


def written(model, prompt, tokens=12, **options):
    """The ids that greedy `generate` puts behind one prompt, a list of ids."""
    ids = torch.tensor([prompt])
    return model.generate(ids, do_sample=False, max_new_tokens=tokens, **options)[0, len(prompt) :].tolist()
