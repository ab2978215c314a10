"""The other ways in which models are compiled: phases of decoding, freezing, export, vmap, data parallel training."""

import copy
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.nn.parallel import DistributedDataParallel

import acm_compiler as acm
from acm_compiler.acm import context, ops
from acm_compiler.acm.context import Said, batch_held
from acm_compiler.backend import explanation
from acm_compiler.errors import FixedBudget, UsageError
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.runtime import control
from tests.helpers import ROOT
from tests.helpers.backend_ranks import RANKS, examples, gradients, make_model
from tests.helpers.build import planned_site, sliced_site, stack_of

ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh():
    """Graphs of other tests do not count."""
    torch._dynamo.reset()
    counters.clear()


def test_choices_of_both_phases_change_without_a_new_graph():
    model = stack_of(planned_site("a"), planned_site("b", k_min=1))
    uniform = copy.deepcopy(model)
    compiled = torch.compile(model, backend="acm", fullgraph=True, dynamic=True)
    prompt, token = torch.randn(3, 5, 8), torch.randn(3, 1, 8)
    with torch.no_grad():
        for prefill, decode in ((4, 1), (2, 4), (1, 2)):
            set_k(model, prefill, phase="prefill")
            set_k(model, decode, phase="decode")
            for x, k in ((prompt, prefill), (token, decode)):
                set_k(uniform, k)
                torch.testing.assert_close(compiled(x), uniform(x))
    assert counters["stats"]["unique_graphs"] == 2  # inputs of one token per example have their own


class _Broken(torch.nn.Module):
    """An MLP whose graph breaks between its linears, as it does where a forward prints."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.first(x))
        torch._dynamo.graph_break()
        return x + self.second(hidden)


def test_a_graph_may_break_between_the_linears_of_a_site_in_any_thread():
    model = _Broken().eval()
    model = acm.rewrite(model, acm.plan(model, torch.randn(2, 3, 8), sites="mlp", init="random"))
    compiled = torch.compile(model, backend="eager")
    inputs = [torch.randn(2, 3, 8) for _ in range(3)]
    with ThreadPoolExecutor(1) as other:
        found = [compiled(inputs[0]), other.submit(compiled, inputs[1]).result(), compiled(inputs[2])]
    for x, y in zip(inputs, found, strict=True):
        torch.testing.assert_close(y, model(x))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_a_decoder_of_transformers_has_one_graph_for_all_batches_of_two_and_more():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()
    x = {"input_ids": torch.ones(2, 6, dtype=torch.int64)}
    model = acm.rewrite(model, acm.plan(model, x, init="random"))
    compiled = torch.compile(model, backend="acm", dynamic=True)
    with torch.no_grad():
        for batch in (8, 3, 2, 64, 1, 5):
            x = {"input_ids": torch.randint(1, 50, (batch, 6))}
            for k in (4, 1):
                control.set_k(model, k)
                torch.testing.assert_close(compiled(**x).logits, model(**x).logits)
            assert counters["stats"]["unique_graphs"] == (1 if batch in (8, 3, 2, 64) else 2)
    assert acm.explain(model, x).sites[-1].fused == ("norm", "gate", "residual")  # an RMSNorm, written out


def set_k(model, k: int, *, phase=None) -> None:
    for site in model.acms:
        site.set_choices(knob=0.0, k_lo=k, k_hi=k, phase=phase)


@pytest.fixture
def freezing():
    with inductor.patch(freezing=True):
        yield


@pytest.mark.usefixtures("freezing")
@pytest.mark.parametrize("backend", ["acm", "inductor"])
def test_a_frozen_model_follows_another_choice_by_another_graph(backend, caplog):
    model = stack_of(planned_site("a"), planned_site("b", k_min=1))
    eager, x = copy.deepcopy(model), torch.randn(3, 5, 8)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    graphs = []
    with torch.no_grad(), caplog.at_level("INFO", logger="acm_compiler.backend"):
        for choice in ((0.0, 4, 4), (0.3, 0, 4), (-0.5, 0, 4), (0.0, 4, 4), (0.3, 0, 4)):
            for site in (*model.acms, *eager.acms):
                site.set_choices(knob=choice[0], k_lo=choice[1], k_hi=choice[2])
            torch.testing.assert_close(compiled(x), eager(x))
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 2, 3, 3, 3]  # what was compiled for a choice is kept
    assert ("another one compiles another graph" in caplog.text) == (backend == "acm")


@pytest.mark.usefixtures("freezing")
def test_a_frozen_model_follows_budgets_of_examples_and_of_phases():
    model = stack_of(planned_site("a"))
    eager, x = copy.deepcopy(model), torch.randn(3, 5, 8)
    compiled = torch.compile(model, backend="acm", dynamic=True)
    with torch.no_grad():
        for k_lo in ([0, 2, 4], [4, 4, 0]):
            said = Said(knob=torch.zeros(3), k_lo=torch.tensor(k_lo, dtype=torch.int32), most=torch.arange(5))
            with batch_held(conversion(model), said), batch_held(conversion(eager), said):
                torch.testing.assert_close(compiled(x), eager(x))
        assert counters["stats"]["unique_graphs"] == 1  # what a batch says is no constant
        for decode in (1, 3):
            set_k(model, decode, phase="decode")
            set_k(eager, decode, phase="decode")
            for part in (x, torch.randn(3, 1, 8)):
                torch.testing.assert_close(compiled(part), eager(part))


@pytest.mark.usefixtures("freezing")
def test_a_model_whose_parameters_freezing_discarded_refuses_another_budget():
    model, x = stack_of(planned_site("a")), torch.randn(3, 5, 8)
    expected = model(x)
    with torch.no_grad(), inductor.patch(freezing_discard_parameters=True):
        compiled = torch.compile(model, backend="acm")
        torch.testing.assert_close(compiled(x), expected)
        with pytest.raises(FixedBudget, match=r"(?s)a: Inductor froze this model .* load the model anew"):
            control.set_k(model, 2)
        torch.testing.assert_close(compiled(x), expected)


def test_an_exported_model_says_that_it_keeps_its_budget():
    model, x = stack_of(planned_site("a")).eval(), torch.randn(3, 5, 8)
    program = torch.export.export(model, (x,))
    for made in (program, program.module(), torch.export.unflatten(program)):
        with pytest.raises(FixedBudget, match=r"(?s)keeps the budget or k .* export that again"):
            acm.set_budget(made, 0.5)
        with pytest.raises(FixedBudget), acm.batch(made, budgets=[0.5]):
            pass
    with pytest.raises(UsageError, match=r"a model must be a torch\.nn\.Module \(found str"):
        acm.set_budget("package.pt2", 0.5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_may_be_mapped_over(compiled):
    model = stack_of(planned_site("a"), planned_site("b", kind="gated_mlp", learner_act="silu"))
    # by name: torch 2.11 asks a callable without one for its repr, which it cannot compile for a Sequential
    mapped = torch.func.vmap(lambda part: model(part))
    x = torch.randn(4, 3, 5, 8)
    with torch.no_grad():
        answer = torch.compile(mapped, backend="acm", fullgraph=True)(x) if compiled else mapped(x)
        torch.testing.assert_close(answer, torch.stack([model(part) for part in x]))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_that_learns_may_be_mapped_over(compiled):
    model, x = stack_of(planned_site("a", k_min=1), planned_site("b")), torch.randn(4, 3, 5, 8)
    set_k(model, 3)
    learned = [p for name, p in model.named_parameters() if ".learners." in name]
    mapped = torch.func.vmap(lambda part: model(part))
    answer = torch.compile(mapped, backend="acm", fullgraph=True)(x) if compiled else mapped(x)
    expected = torch.stack([model(part) for part in x])
    torch.testing.assert_close(answer, expected)
    grads, expected_grads = (torch.autograd.grad(y.square().sum(), learned) for y in (answer, expected))
    torch.testing.assert_close(grads, expected_grads, atol=1e-4, rtol=1e-4)


MAPPED_SITES = {
    "mlp": {"k_min": 0},
    "per_k": {"second_layer": "per_k"},
    "lossless": {"kind": "linear", "form": "svd", "lossless": True},
    "gated": {"kind": "gated_mlp", "learner_act": "silu"},
}


@pytest.mark.parametrize("options", MAPPED_SITES.values(), ids=MAPPED_SITES)
def test_every_example_of_a_batch_may_have_gradients_of_its_own(options):
    model, x = stack_of(planned_site("a", **options)).double(), torch.randn(4, 3, 5, 8, dtype=torch.float64)
    learned = {name: p.detach() for name, p in model.named_parameters() if ".learners." in name}

    def loss(parameters, part):
        return torch.func.functional_call(model, parameters, part).square().sum()

    own = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(learned, x)
    for i, part in enumerate(x):
        expected = torch.func.grad(loss)(learned, part)
        torch.testing.assert_close({name: g[i] for name, g in own.items()}, expected)
    together = torch.func.grad(lambda p, x: torch.func.vmap(loss, in_dims=(None, 0))(p, x).sum())(learned, x)
    torch.testing.assert_close(together, {name: g.sum(0) for name, g in own.items()})


@pytest.mark.parametrize("learns", [False, True])
def test_directional_derivatives_go_through_learners(learns):
    model = stack_of(planned_site("a", k_min=1), planned_site("b")).double().requires_grad_(learns)
    set_k(model, 3)
    x, direction = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 5, 8, dtype=torch.float64)
    with torch.set_grad_enabled(learns):
        _, slope = torch.func.jvp(lambda part: model(part), (x,), (direction,))
    with torch.no_grad():
        ahead, behind = (model(x + step * direction) for step in (1e-5, -1e-5))
    torch.testing.assert_close(slope, (ahead - behind) / 2e-5, atol=1e-6, rtol=1e-6)


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_data_parallel_training_compiles_to_the_same_gradients():
    model, x = stack_of(planned_site("a", k_min=1), planned_site("b")), torch.randn(3, 5, 8)
    set_k(model, 3)
    learned = {name: p for name, p in model.named_parameters() if ".learners." in name}
    expected = torch.autograd.grad(model(x).square().sum(), list(learned.values()))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in learned)
    compiled = torch.compile(DistributedDataParallel(model), backend="acm")
    compiled(x).square().sum().backward()
    assert counters["stats"]["unique_graphs"] >= 1
    for parameter, grad in zip(learned.values(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_ranks_train_compiled_with_the_gradients_of_one_eager_process(tmp_path):
    command, environment = [sys.executable, "-m", "tests.helpers.backend_ranks", str(tmp_path)], os.environ | ONE_THREAD
    runs = [subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE) for rank in range(RANKS)]
    for run in runs:
        _, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors.decode()
    expected = gradients(make_model(), examples())
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


@pytest.fixture
def dense(monkeypatch):
    """Graphs of CPU tensors take the way of those of a GPU where all tokens run one k."""
    monkeypatch.setattr(context, "DENSE_PREFIXES", {"cpu"})


def operators_of(model, *inputs) -> list[str]:
    """The ACM operators of each graph that Dynamo makes of the model."""
    found = []

    def look(graph_module, _):
        names = [str(node.target) for node in graph_module.graph.nodes if "acm." in str(node.target)]
        found.append(" ".join(names))
        return graph_module.forward

    torch.compile(model, backend=look, fullgraph=True)(*inputs)
    return found


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize(
    "site",
    [
        planned_site(),
        planned_site(kind="gated_mlp"),
        planned_site(second_layer="per_k"),
        planned_site(second_layer="shared_top"),
        sliced_site(role="q"),
        sliced_site(role="o"),
    ],
    ids=("mlp", "gated", "per_k", "shared_top", "rows", "cols"),
)
def test_one_k_for_all_tokens_has_dense_products_and_no_graph_of_its_own(site):
    model, x = stack_of(site), torch.randn(3, 5, 8)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for k in (None, 4, 3, 1, 2, 0, None, 4, 2, 3, 1):
            for acms in (model.acms, eager.acms):
                acms[0].set_choices(knob=0.0, k_lo=k or 0, k_hi=4 if k is None else k)
            torch.testing.assert_close(compiled(x), eager(x))
        # gates, none, some, all; of slices one learner, whose reshapes are others
        assert counters["stats"]["unique_graphs"] <= 4 + (site.role in ("q", "o"))
        assert operators_of(model, x) == [""]
        set_k(model, 2, phase="decode")
        model.acms[0].set_choices(knob=0.0, k_lo=0, k_hi=4, phase="prefill")
        assert operators_of(model, torch.randn(3, 1, 8)) == [""]
        assert operators_of(model, x) == ["acm.gate acm.learners"]


@pytest.mark.usefixtures("dense")
@pytest.mark.parametrize("kind", ["mlp", "gated_mlp"])
def test_one_token_of_one_k_runs_its_learners_operator_without_a_gate(kind, monkeypatch):
    monkeypatch.setattr(ops, "VECTOR_KERNELS", {"cpu"})
    model, x = stack_of(planned_site(kind=kind)), torch.randn(1, 1, 8)
    eager, compiled = copy.deepcopy(model), torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for k in (4, 3, 0, 1, 2):
            set_k(model, k)
            set_k(eager, k)
            torch.testing.assert_close(compiled(x), eager(x))
        assert operators_of(model, x) == ["acm.learners"]
        assert operators_of(model, torch.randn(1, 2, 8)) == [""]
        other = stack_of(planned_site(second_layer="per_k"))
        set_k(other, 2)
        assert operators_of(other, x) == [""]
    assert operators_of(model, x) == [""]  # there may be gradients


@pytest.mark.usefixtures("dense")
def test_the_first_graph_of_one_token_at_one_k_loads_the_kernels_that_it_holds(monkeypatch):
    """A model whose k is set before it is compiled: nothing else has loaded them."""
    known = set()
    monkeypatch.setattr(ops, "VECTOR_KERNELS", known)
    monkeypatch.setattr(ops, "load_kernels", known.add)
    model = stack_of(planned_site())
    set_k(model, 2)
    with torch.no_grad():
        assert operators_of(model, torch.randn(1, 1, 8)) == ["acm.learners"]


@pytest.mark.parametrize("k", [None, 2])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_tokens_whose_number_only_the_device_knows_share_one_graph(k, dense):
    model, x = stack_of(planned_site()), torch.randn(9, 8)
    if k is not None:
        set_k(model, k)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x, mask):
        return model(x[mask])

    with torch.no_grad():
        for tokens in (4, 1, 9, 0):
            mask = torch.arange(9) < tokens
            torch.testing.assert_close(compiled(x, mask), model(x[mask]))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("dense")
def test_inductor_follows_one_k_for_all_tokens_and_a_meter_counts_it():
    model, x = stack_of(planned_site("a"), planned_site("b", k_min=1)), torch.randn(3, 5, 8)
    eager, compiled = copy.deepcopy(model), torch.compile(model, backend="acm", fullgraph=True)
    for site in model.acms:
        site.counts = torch.zeros(5, dtype=torch.int64)
    with torch.no_grad():
        for k in (4, 2, 0):
            set_k(model, k)
            set_k(eager, k)
            torch.testing.assert_close(compiled(x), eager(x))
    assert model.acms[0].counts.tolist() == [15, 0, 15, 0, 15]
    assert model.acms[1].counts.tolist() == [0, 15, 15, 0, 15]  # its k_min is 1


@pytest.mark.usefixtures("dense")
def test_budgets_of_examples_autocast_and_exports_keep_the_operators():
    model, x = stack_of(planned_site("a")), torch.randn(3, 5, 8)
    set_k(model, 2)
    with torch.no_grad():
        with torch.autocast("cpu"):
            assert "acm.learners" in operators_of(model, x)[0]
        exported = torch.export.export(model, (x,))
        assert "acm.learners" in str(exported.graph)
        said = Said(knob=torch.zeros(3), k_lo=torch.tensor([0, 2, 4], dtype=torch.int32), most=torch.arange(5))
        with batch_held(conversion(model), said):
            assert "acm.learners" in operators_of(model, x)[0]


@pytest.mark.usefixtures("dense")
def test_explain_says_where_one_k_is_dense_products(monkeypatch):
    model, x = stack_of(planned_site("a")), torch.randn(3, 5, 8)
    monkeypatch.setattr(explanation, "DENSE_PREFIXES", {"cpu"})
    set_k(model, 2)
    site = acm.explain(model, x).sites[0]
    assert site.implementation == "dense products" and "k = 2" in site.reason
    model.acms[0].set_choices(knob=0.0, k_lo=0, k_hi=4)
    assert acm.explain(model, x).sites[0].implementation == "cpu"
