"""The backend as users reach it: by name, with nothing imported; options, fallbacks, explanations, caches."""

import functools
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters, warn_once_cache

import acm_compiler as acm
from acm_compiler.backend import choose_implementation, split_options
from acm_compiler.codegen import compare
from acm_compiler.errors import KernelUnavailable, UsageError, VerificationFailed
from acm_compiler.passes.lower.verify import Call, GateCall
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, conversion, sites
from acm_compiler.runtime.control import set_k
from tests.helpers.build import planned_site, stack_of

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPT = """
import torch
f = torch.compile(torch.nn.Linear(4, 4), backend="acm")
print(tuple(f(torch.randn(2, 4)).shape))
"""


@pytest.fixture(autouse=True)
def fresh():
    """Graphs of other tests do not count."""
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.slow
def test_the_backend_is_found_without_an_import():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(2, 4)"


def test_a_rewritten_model_compiles_to_the_same_answers_at_every_k(caplog):
    model = stack_of(planned_site("a"), planned_site("b", k_min=1))
    compiled = torch.compile(model, backend="acm", fullgraph=True)
    x = torch.randn(3, 5, 8)
    with torch.no_grad(), caplog.at_level("INFO", logger="acm_compiler.backend"):
        for k in (4, 2, 0):
            set_k(model, k)
            torch.testing.assert_close(compiled(x), model(x))
    assert [record.message for record in caplog.records if "2 ACMs: 2 by kernels" in record.message] != []
    assert len(sites(compiled)) == 2


def test_budgets_of_examples_overrule_a_fixed_k_in_a_graph_that_is_kept():
    model = stack_of(planned_site("a"), planned_site("b", k_min=1))
    conversion(model).table = BudgetTable(
        rule="logits",
        points=(BudgetPoint(share=0.1, knob=1.0, k_lo=0), BudgetPoint(share=0.9, knob=-1.0, k_lo=0)),
        examples=1,
    )
    compiled, x = torch.compile(model, backend="acm", fullgraph=True), torch.randn(3, 5, 8)
    answers = []
    with torch.no_grad():
        for k in (None, 1, 0, 4):
            set_k(model, k)
            with acm.batch(model, budgets=[0.3, 1.0, 0.6]):
                answers.append(compiled(x))
                torch.testing.assert_close(answers[-1], model(x))
        x[1, 2] = torch.nan
        with acm.batch(model, budgets=[0.3, 1.0, 0.6]):
            torch.testing.assert_close(compiled(x), model(x), equal_nan=True)
    for other in answers[1:]:
        assert torch.equal(other, answers[0])
    assert counters["stats"]["unique_graphs"] == 1


def test_a_dense_model_is_inductors_and_one_line_says_so(caplog):
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with torch.no_grad(), caplog.at_level("INFO", logger="acm_compiler.backend"):
        torch.testing.assert_close(torch.compile(model, backend="acm")(x), model(x))
    assert [record.message for record in caplog.records if "acm.rewrite" in record.message] != []


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"max_autotuen": True}, "max_autotune"),
        ({"fallbak": "error"}, "fallback"),
        ({"fallback": "eror"}, "did you mean 'error'"),
        ({"fuse_residual": "yes"}, "True | False"),
    ],
)
def test_an_unknown_option_or_value_is_refused_with_the_nearest_name(options, hint):
    with pytest.raises(UsageError) as caught:
        split_options(options, torch._inductor.list_options())
    assert hint in str(caught.value)
    with pytest.raises(UsageError, match=r"^(unknown )?option") as raised:
        torch.compile(torch.nn.Linear(4, 4), backend="acm", options=options)(torch.randn(2, 4))
    assert hint in str(raised.value) and raised.value.exit_code == 2


def test_an_unknown_mode_is_refused_with_the_nearest_name():
    with pytest.raises(UsageError, match=r"unknown mode 'max-autotun' of backend 'acm' .did you mean 'max-autotune'"):
        torch.compile(torch.nn.Linear(4, 4), backend="acm", mode="max-autotun")(torch.randn(2, 4))


def test_a_value_that_inductors_option_cannot_have_is_refused():
    with pytest.raises(UsageError, match=r"option 'max_autotune' of Inductor: .*found 'yes', expected bool"):
        torch.compile(torch.nn.Linear(4, 4), backend="acm", options={"max_autotune": "yes"})(torch.randn(2, 4))


def test_inductors_options_are_passed_on():
    own, inductors = split_options({"max-autotune": True, "fallback": "silent"}, torch._inductor.list_options())
    assert own["fallback"] == "silent" and inductors == {"max_autotune": True}


def composite():
    return stack_of(planned_site("acms.0", learner_act="mul(x, sigmoid(mul(x, 1.5)))"), planned_site("acms.1"))


def test_an_acm_without_a_kernel_is_named_with_its_line(caplog):
    model, x = composite(), torch.randn(2, 5, 8)
    with torch.no_grad(), caplog.at_level("WARNING", logger="acm_compiler.backend"):
        torch.testing.assert_close(torch.compile(model, backend="acm")(x), model(x))
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("acms.0 (build.py:") and "mul(x, sigmoid(mul(x, 1.5)))" in message


def test_without_a_compiler_for_inductor_the_graph_runs_uncompiled(caplog):
    model, x = stack_of(planned_site("a")), torch.randn(2, 5, 8)
    expected = model(x)
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.cxx": ("/nonexistent/g++",)}):
        with caplog.at_level("WARNING", logger="acm_compiler.backend"):
            y = torch.compile(model, backend="acm")(x)
        y.sum().backward()
        (message,) = [record.message for record in caplog.records]
        assert "no C++ compiler" in message and "/nonexistent/g++" in message and "uncompiled" in message
        torch.testing.assert_close(y, expected)
        torch._dynamo.reset()
        with pytest.raises(KernelUnavailable, match=r"^Inductor has no C\+\+ compiler"):
            torch.compile(model, backend="acm", options={"fallback": "error"})(x)


def test_what_runs_follows_device_type_and_the_switch(monkeypatch):
    call = Call(form="mlp", act="gelu", dtype=torch.float32, device="cpu", shape=(4, 8, 8))
    assert choose_implementation(call) == ("cpu", None)
    assert "float64" in choose_implementation(replace(call, dtype=torch.float64))[1]
    assert choose_implementation(replace(call, device="meta")) == ("reference", "no kernels for device meta are loaded")
    apart, reason = choose_implementation(replace(call, gate=GateCall(dtype=torch.float64, width=8)))
    assert apart == "cpu, gate by reference" and reason.startswith("its gate: ") and "float64" in reason
    monkeypatch.setenv("ACM_KERNEL", "reference")
    assert choose_implementation(call) == ("reference", "ACM_KERNEL=reference")


def test_fallback_error_refuses_it_and_names_the_remedy():
    compiled = torch.compile(composite(), backend="acm", options={"fallback": "error"})
    with torch.no_grad(), pytest.raises(KernelUnavailable, match=r"build\.py:\d+") as caught:
        compiled(torch.randn(2, 5, 8))
    assert "no kernel covers this ACM" in str(caught.value) and '"fallback": "warn"' in str(caught.value)


def test_the_option_of_freezing_that_freezes_nothing_is_said_to_do_so(caplog):
    model, x = stack_of(planned_site("a")), torch.randn(2, 5, 8)
    with torch.no_grad(), caplog.at_level("WARNING", logger="acm_compiler.backend"):
        torch.compile(model, backend="acm", options={"freezing": True})(x)
    assert "nothing was frozen: for Dynamo options= comes too late; set torch._inductor.config.freezing" in caplog.text


def test_explain_says_what_runs_each_site():
    model = composite()
    said = acm.explain(torch.compile(model, backend="acm"), torch.randn(2, 5, 8))
    odd, plain = said.sites
    assert (odd.site, odd.implementation, odd.fused) == ("acms.0", "reference", ("gate", "residual"))
    assert (plain.site, plain.implementation, plain.reason) == ("acms.1", "cpu", None)
    assert said.graphs == 1 and "2 ACMs in 1 graph" in str(said)
    assert said.as_json()["sites"][1]["implementation"] == "cpu"


class Often(nn.Module):
    """The same layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = stack_of(planned_site("layer.acms.0"))

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x)
        return x


def test_explain_counts_the_calls_of_a_site_that_runs_often():
    model, x = Often(), torch.randn(2, 5, 8)
    said = acm.explain(model, x)
    header, _, row, total = str(said).splitlines()[:4]
    assert header.split()[-1] == "calls" and row.split()[-1] == "3" and total.startswith("1 ACM in 1 graph")
    assert len(said.sites) == 3
    assert "calls" not in str(acm.explain(model.layer, x))


def test_explain_names_sites_as_the_plan_does_under_a_wrapped_forward():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=60)).eval()
    inputs = {"input_ids": torch.ones(1, 7, dtype=torch.int64)}
    plan = acm.plan(dense, inputs, sites="mlp", init="random")
    said = acm.explain(acm.rewrite(dense, plan), inputs)
    assert [site.site for site in said.sites] == [site.name for site in plan.sites]
    assert all(site.implementation == "cpu" for site in said.sites)


def test_explain_and_fallback_tell_of_a_gate_without_a_kernel(caplog):
    model, x = stack_of(planned_site("acms.0"), planned_site("acms.1")), torch.randn(2, 5, 8)
    model.acms[0].gate.double()
    a, b = acm.explain(model, x).sites
    assert a.implementation == "cpu, gate by reference" and "float64" in a.reason and (b.reason is None)
    with torch.no_grad(), caplog.at_level("WARNING", logger="acm_compiler.backend"):
        torch.testing.assert_close(torch.compile(model, backend="acm")(x), model(x))
    assert "runs on cpu, gate by reference: its gate" in caplog.text
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(KernelUnavailable, match="or its gate"):
        torch.compile(model, backend="acm", options={"fallback": "error"})(x)


@pytest.mark.parametrize("inputs", [(torch.zeros(2, 5, 8),), {"x": torch.zeros(2, 5, 8)}])
def test_explain_takes_inputs_as_plan_does(inputs):
    assert len(acm.explain(composite(), inputs).sites) == 2


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        ((torch.zeros(2, 5, 7),), r"^acms.0: the input must have .*expected \[..., 8\]"),
        ((torch.zeros(2, 5, 8, 3),), r"^acms.0: the input must have"),
        ({"z": torch.zeros(2, 5, 8)}, r"found TypeError: .*'z'.*\n  give inputs that the model takes"),
    ],
)
def test_explain_says_what_the_model_raises_with_wrong_inputs(inputs, found):
    with pytest.raises(acm.AcmError, match=found):
        acm.explain(composite(), inputs)


def test_explain_leaves_what_only_compiling_raises_as_it_is(monkeypatch):
    def fail(*_):
        raise ArithmeticError("while compiling")

    monkeypatch.setattr("acm_compiler.backend.explanation.lower", fail)
    with pytest.raises(Exception, match="while compiling") as caught:
        acm.explain(stack_of(planned_site("a")), torch.randn(2, 5, 8))
    assert not isinstance(caught.value, acm.AcmError)


@functools.lru_cache
def cached_answer():
    return 2


class Cached(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        warn_here()
        return self.inner(x) * cached_answer()


@torch._dynamo.disable
def warn_here():
    warnings.warn("of the model itself", UserWarning, stacklevel=2)


def test_explain_keeps_to_itself_what_dynamo_says_of_a_librarys_cache():
    warn_once_cache.clear()  # Dynamo says it once in a process
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # of every graph
        acm.explain(Cached(stack_of(planned_site("a"))), torch.randn(2, 5, 8))
    assert {str(warning.message) for warning in said} == {"of the model itself"}


def test_explain_names_sites_that_run_their_dense_region():
    model = stack_of(planned_site("a"), planned_site("b"))
    model.acms[1].dense, model.acms[1].state = torch.nn.Identity(), "dense"
    said = {site.site: site for site in acm.explain(model, torch.randn(2, 5, 8)).sites}
    assert said["b"].implementation == "dense" and "learners are fitted" in said["b"].reason


class Choosy(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *rest, **kwargs):
        return self.inner(x) * 2 if x.shape[0] < 16 else self.inner(x + rest[0] + kwargs["y"])


def choosy_conditions(*shapes):
    torch.compiler.reset()
    x, rest, y = (torch.randn(shape) for shape in shapes)
    said = acm.explain(Choosy(stack_of(planned_site("a"))), x, rest, y=y)
    assert said.as_json()["conditions"] == [{"expression": c.expression, "line": c.line} for c in said.conditions]
    assert str(said).count("\n  ") == len(said.conditions)
    return {condition.expression: condition.line for condition in said.conditions}


class InRegions(nn.Module):
    """Blocks that torch compiles by themselves: alike ones once."""

    def __init__(self, *acms) -> None:
        super().__init__()
        self.acms, self.norm = nn.ModuleList(acms), nn.LayerNorm(8)

    def forward(self, x):
        region = torch.compiler.nested_compile_region(lambda site, x: x + site(self.norm(x)))
        for site in self.acms:
            x = region(site, x)
        return x


def test_sites_in_nested_regions_are_fused_and_explained(caplog):
    model, x = InRegions(*stack_of(planned_site("acms.0"), planned_site("acms.1")).acms).eval(), torch.randn(2, 5, 8)
    with torch.no_grad(), caplog.at_level("INFO", logger="acm_compiler.backend"):
        torch.testing.assert_close(torch.compile(model, backend="acm")(x), model(x))
    assert "graph with 1 ACM: 1 by kernels" in caplog.text
    torch._dynamo.reset()
    first, second = acm.explain(model, x).sites
    assert (first.site, first.implementation, first.fused) == ("acms.0", "cpu", ("norm", "gate", "residual"))
    # torch 2.11 gives explain a body for each
    assert second.implementation == "cpu" or "the body of a region with others" in second.reason


def test_explain_names_what_its_graph_asks_of_sizes_and_the_line_that_does():
    asked = choosy_conditions((4, 5, 8), (1, 5, 1), (1, 1, 8))
    assert asked["x.size(0) < 16"] == f"{__file__}:{line_of(Choosy.forward)} in forward"
    assert "x.size(2) == 8" in asked and not [c for c in asked if "x.size(1)" in c or "rest" in c or "y" in c]
    asked = choosy_conditions((20, 5, 8), (20, 5, 1), (1, 1, 8))
    assert {"x.size(0) >= 16", "x.size(0) == rest[0].size(0)", "x.size(2) == y.size(2)"} <= asked.keys()


def test_explain_asks_nothing_of_sizes_that_are_free():
    said = acm.explain(stack_of(planned_site("a")), torch.randn(2, 5, 8))
    assert {c.expression for c in said.conditions} == {"x.size(2) == 8"}


def line_of(function):
    return function.__code__.co_firstlineno + 1


def test_one_graph_serves_all_batches_and_choices_but_the_empty_and_the_single_one():
    model = stack_of(planned_site("a"), planned_site("b", k_min=1))
    compiled = torch.compile(model, backend="acm", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for batch in (2, 3, 8, 64):
            for knob, k_lo, k_hi in ((0.0, 0, 4), (0.4, 1, 4), (-0.4, 0, 3), (0.0, 2, 2), (0.0, 4, 4)):
                for site in model.acms:
                    site.set_choices(knob=knob, k_lo=k_lo, k_hi=k_hi)
                x = torch.randn(batch, 5, 8)
                torch.testing.assert_close(compiled(x), model(x))
        assert counters["stats"]["unique_graphs"] == 1
        for batch in (1, 0):
            assert compiled(torch.randn(batch, 5, 8)).shape == (batch, 5, 8)
    assert counters["stats"]["unique_graphs"] <= 3


def test_a_second_compilation_is_taken_from_the_graph_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = stack_of(planned_site("a"), planned_site("b")), torch.randn(2, 5, 8)
    found = []
    with torch.no_grad():
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            torch.compile(model, backend="acm")(x)
            found.append((counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]))
    assert found == [(1, 0), (0, 1)]


def test_gradients_of_a_compiled_model_are_those_of_the_eager_one():
    model = stack_of(planned_site("a"), planned_site("b", kind="gated_mlp", learner_act="silu"))
    compiled = torch.compile(model, backend="acm", fullgraph=True)
    x = torch.randn(3, 5, 8, requires_grad=True)
    learned = [x, *(p for site in model.acms for p in site.learners.parameters())]
    ours = torch.autograd.grad(compiled(x).square().sum(), learned)
    plain = torch.autograd.grad(model(x).square().sum(), learned)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_finetuning_compiles_without_breaks():
    model = stack_of(planned_site("a", k_min=1)).train()
    for site in model.acms:
        site.temperature = 0.8
    compiled = torch.compile(model, backend="acm", fullgraph=True)
    compiled(torch.randn(3, 5, 8)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    choices = model.acms[0].choices
    assert len(choices) == 1 and choices[0].nu.shape == (3, 5, 4)


def test_autocast_casts_what_the_operator_reads():
    model, x = stack_of(planned_site("a")), torch.randn(3, 5, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        eager, compiled = model(x), torch.compile(model, backend="acm", fullgraph=True)(x)
    torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)
    assert eager.dtype == compiled.dtype == torch.float32  # a float32 bypass plus a bfloat16 branch


def test_a_kernel_that_differs_is_named_by_its_site(monkeypatch):
    model, x = stack_of(planned_site("decoder.mlp")), torch.randn(9, 8)
    tensors = model.acms[0].learners.weights().tensors
    monkeypatch.setitem(compare.TOLERANCE, torch.float32, -1.0)
    with torch.no_grad(), pytest.raises(VerificationFailed, match=r"decoder\.mlp: a kernel's output differs"):
        compare.checked(torch.ops.acm.learners_cpu)(x, torch.full((9,), 3), *tensors, form="mlp", act="gelu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "inductor"},
        {"backend": "acm", "mode": "reduce-overhead"},
        {"backend": "acm", "options": {"freezing": True}},
        {"backend": "inductor", "options": {"cpp_wrapper": True}},
    ],
    ids=["plain inductor", "reduce-overhead", "freezing", "cpp_wrapper"],
)
def test_other_ways_to_compile_give_the_same_answers(options):
    model, x = stack_of(planned_site("a"), planned_site("b", kind="gated_mlp")), torch.randn(3, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True, **options)(x), model(x))


def test_export_keeps_one_node_per_acm_and_any_batch():
    model = stack_of(planned_site("a"), planned_site("b", k_min=1)).eval()
    shapes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    program = torch.export.export(model, (torch.randn(3, 5, 8),), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("acm.learners.default") == targets.count("acm.gate.default") == 2
    x = torch.randn(7, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.slow
def test_an_aot_inductor_package_runs(tmp_path):
    model, x = stack_of(planned_site("a")).eval(), torch.randn(3, 5, 8)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "acm.pt2"))
        torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), model(x))
