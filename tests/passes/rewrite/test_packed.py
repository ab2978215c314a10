"""One ACM in the place of q, k and v: answers, gradients, copies and files as of separate ones, and what is refused."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import acm_compiler as acm
from acm_compiler.calibration.calibrate import calibrate_on
from acm_compiler.calibration.examples import Options, masked
from acm_compiler.errors import AcmError
from acm_compiler.passes.rewrite.conversion import conversion
from tests.helpers import models
from tests.helpers.rewrite_cases import give_budgets


class Partly(nn.Module):
    """Self-attention of two heads whose keys alone have no bias, as Whisper's, and whose values are computed first."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=name != "k") for name in "qkvo")

    def forward(self, x):
        v, q, k = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.v, self.q, self.k))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.o(y.transpose(1, 2).flatten(2))


CASES = {
    "partly": lambda: (Partly(), torch.randn(2, 5, 16)),
    "hf_bert": models.hf_bert,
    "torchvision_vit": models.torchvision_vit,
    "torch": lambda: models.torch_encoder(batch_first=True),
}


def opened(case):
    return models.in_float64(CASES[case])


def answer(model, x):
    output = model(x)
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    return output


def gradients(model, x):
    """Gradients of the model's own parameters by name, and of its input; and its output."""
    leaves = {name: p for name, p in model.named_parameters() if p.requires_grad and "learners" not in name}
    leaves = {name: p for name, p in leaves.items() if "gate" not in name} | ({"input": x} if x.requires_grad else {})
    output = answer(model, x)
    found = torch.autograd.grad(output.square().sum(), [*leaves.values()], allow_unused=True)
    return {"output": output.detach()} | {n: g for n, g in zip(leaves, found, strict=True) if g is not None}


def packed(model, x, **options):
    rule = {"match": "attn", "learners": 2, "pack": True} | options
    return acm.rewrite(model, acm.plan(model, x, sites=[rule]))


def relative(found, wanted):
    return float((found - wanted).detach().norm() / wanted.detach().norm())


@pytest.mark.parametrize("case", CASES)
def test_answers_and_gradients_are_the_models_own_before_and_after_the_fit_and_once_reverted(case):
    model, x = opened(case)
    before = gradients(model, x.requires_grad_(x.is_floating_point()))
    converted = packed(model, x, form="slices")
    after = gradients(converted, x)
    assert relative(after.pop("output"), wanted := before.pop("output")) < 1e-14
    assert after and all(relative(after[name], before[name]) < 1e-10 for name in after)
    x = x.detach()
    calibrate_on(converted, masked([x] * 3), options=Options(tokens=10, gate_steps=5))
    assert {site.form for site in conversion(converted).plan.sites} == {"slices"}
    acm.set_k(converted, 2)
    assert relative(answer(converted, x), wanted) < 1e-9
    acm.set_k(converted, 1)
    assert relative(answer(converted, x), wanted) > 1e-4
    back = acm.revert(converted)
    assert torch.equal(answer(back, x), wanted) and back.state_dict().keys() == model.state_dict().keys()


def test_copies_files_and_compiled_models_answer_alike(tmp_path):
    model, x = opened("hf_bert")
    model.float()
    converted = packed(model, x, form="svd")
    calibrate_on(converted, masked([x] * 3), options=Options(tokens=10, gate_steps=5))
    give_budgets(converted)
    acm.set_budget(converted, 0.6)
    with torch.no_grad():
        wanted = answer(converted, x)
        for other in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
            assert torch.equal(answer(other, x), wanted)
        assert torch.allclose(answer(torch.compile(converted, backend="acm", fullgraph=True), x), wanted, atol=1e-5)
        acm.save(converted, tmp_path / "saved")
        loaded = acm.load(tmp_path / "saved", base_model=model)
        acm.set_budget(loaded, 0.6)
        assert torch.equal(answer(loaded, x), wanted)
        program = torch.export.export(converted, (x,)).module()
        assert torch.allclose(answer(program, x), wanted, atol=1e-5)


def test_threads_keep_their_parts_apart():
    model, x = opened("torch")
    converted, many = packed(model, x), [torch.randn(2, 7, 32).double() for _ in range(8)]
    wanted = [answer(model, one) for one in many]
    found = {}

    def run(i):
        for _ in range(5):
            found[i] = answer(converted, many[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(many))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.allclose(found[i], wanted[i]) for i in range(len(many)))


class Switched(nn.Module):
    """Self-attention that can be told, once planned, to read its keys elsewhere, or to leave its queries out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.keys, self.queries = None, None

    def forward(self, x):
        q = self.q(x) if self.queries is None else self.queries
        k, v = self.k(x if self.keys is None else self.keys), self.v(x)
        return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(("way", "match"), [("keys", "different tokens"), ("queries", "without the first one")])
def test_another_path_than_the_planned_one_is_refused(way, match):
    model, x = Switched().eval(), torch.randn(2, 5, 16)
    converted = packed(model, x)
    assert torch.allclose(converted(x), model(x), atol=1e-6)
    setattr(converted, way, torch.randn(2, 5, 16))
    with pytest.raises(AcmError, match=match):
        converted(x)
    setattr(converted, way, None)
    assert torch.allclose(converted(x), model(x), atol=1e-6)
