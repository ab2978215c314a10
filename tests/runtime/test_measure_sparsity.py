"""`acm.measure_sparsity`: sizes of what learners multiply, of real tokens alone."""

import pytest
import torch

import acm_compiler as acm
from acm_compiler.acm.sparse import column_norms
from acm_compiler.errors import CompiledModelError, DataError, UsageError
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.runtime.sparsity import STEPS, quantile, quantiles_of
from tests.helpers.decoders import drawn, gated_llama, llama

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model():
    return gated_llama()


def test_quantiles_are_those_of_the_inputs_times_their_columns(model):
    ids = drawn(4, 20)
    seen = {}

    def keep(site, args):
        seen[site.name] = args[0].detach().reshape(-1, args[0].shape[-1])

    handles = [site.register_forward_pre_hook(keep) for site in acm.sites(model).values()]
    acm.set_budget(model, 0.6)
    acm.measure_sparsity(model, [{"input_ids": ids}], tokens=80)
    for handle in handles:
        handle.remove()
    for name, site in acm.sites(model).items():
        sizes = conversion(model).value_sizes[name]
        assert len(sizes.inputs) == len(sizes.hidden) == STEPS + 1
        all_sizes = (seen[name].abs() * column_norms(site.learners.weights())[0]).flatten().detach()
        share = (all_sizes < sizes.inputs[STEPS // 4]).float().mean()
        assert float(share) == pytest.approx(0.25, abs=0.01)
        assert list(sizes.hidden) == sorted(sizes.hidden) and sizes.inputs[-1] == pytest.approx(
            float(all_sizes.max()), rel=1e-4
        )


def test_padding_and_tokens_without_learners_do_not_count(model):
    ids, mask = drawn(4, 20), torch.ones(4, 20, dtype=torch.int64)
    padded = torch.nn.functional.pad(ids, (0, 6)), torch.nn.functional.pad(mask, (0, 6))
    acm.set_k(model, 4)
    found = []
    for ids_, mask_ in ((ids, mask), padded):
        acm.measure_sparsity(model, [{"input_ids": ids_, "attention_mask": mask_}], tokens=80)
        found.append(conversion(model).value_sizes)
    for name, sizes in found[0].items():
        assert found[1][name].inputs == pytest.approx(sizes.inputs, rel=1e-3)
    acm.set_k(model, None)


def test_batches_are_read_until_there_are_enough_tokens(model):
    read = []

    def batches():
        for i in range(10):
            read.append(i)
            yield {"input_ids": drawn(4, 20)}

    acm.measure_sparsity(model, batches(), tokens=150)
    assert read == [0, 1]


def test_the_choices_of_the_model_come_back(model):
    acm.set_budget(model, 0.5)
    before = {name: site.run_time() for name, site in acm.sites(model).items()}
    model.train()
    acm.measure_sparsity(model, [{"input_ids": drawn(4, 20)}], tokens=10)
    assert model.training and {name: site.run_time() for name, site in acm.sites(model).items()} == before
    model.eval()


def test_what_cannot_be_measured_is_refused(model):
    with pytest.raises(DataError, match="no real token"):
        acm.measure_sparsity(model, [])
    with pytest.raises(UsageError, match="batches must be an iterable"):
        acm.measure_sparsity(model, {"input_ids": drawn(4, 20)})
    with pytest.raises(CompiledModelError):
        acm.measure_sparsity(torch.compile(model), [])
    quantized = acm.quantize(gated_llama(), "int4")
    with pytest.raises(UsageError, match="floats, and those of this model are int4"):
        acm.measure_sparsity(quantized, [])
    ids = {"input_ids": torch.ones(1, 9, dtype=torch.int64)}
    kept = acm.rewrite(llama(), acm.plan(llama(), ids, sites=[{"match": "mlp", "second_layer": "per_k"}]))
    with pytest.raises(UsageError, match="second_layer per_k"):
        acm.measure_sparsity(kept, [ids])


def test_quantiles_are_linear_between_steps():
    assert [quantile((0.0, 1.0, 3.0), share) for share in (0, 0.25, 0.5, 0.75, 1)] == [0, 0.5, 1, 2, 3]


def test_quantiles_of_few_values_and_of_none():
    assert quantiles_of(torch.tensor([3.0, 1.0, 2.0]), 4) == (1, 1, 2, 3, 3)
    assert quantiles_of(torch.empty(0), 2) == (0, 0, 0)
