"""The launch path under a CUDA driver that does nothing; run by tests/codegen/test_launch_path.py, by itself."""

import gc
import re
from unittest import mock

import pytest
import torch
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from acm_compiler.acm import ops
from acm_compiler.acm.gated_learners import GATED
from acm_compiler.acm.gradients import sorted_tokens
from acm_compiler.acm.reference import prefix_output
from acm_compiler.codegen import gpu
from acm_compiler.codegen.gpu import start
from acm_compiler.codegen.gpu.calls import kept, sites, traced
from acm_compiler.codegen.gpu.calls.warm import warm_up
from acm_compiler.codegen.gpu.launch import FewPlan
from acm_compiler.codegen.gpu.stages import puts_fences
from acm_compiler.codegen.gpu.tiles import buckets
from acm_compiler.errors import UsageError
from benchmarks.host_time.__main__ import mlp
from benchmarks.host_time.driver import faked_gpu
from benchmarks.host_time.graph import gated_call, inductors_code, loaded, packages_code, traced_graph, traced_step

D = 64


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    with faked_gpu(tmp_path_factory.mktemp("stub")) as library, torch.no_grad():
        yield library


@pytest.fixture
def small(stub):
    return mlp(D, learners=3, gate=16, width=64)


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels that were compiled."""
    names, compile_one = [], JITFunction._do_compile

    def count(function, *args, **kwargs):
        names.append(function.__name__)
        return compile_one(function, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "_do_compile", count)
    return names


def rows(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, D, dtype=torch.bfloat16)


def launches(stub, call) -> int:
    before = stub.stub_launches()
    call()
    return stub.stub_launches() - before


def test_kept_plans_start_what_operators_start_and_sort_by_the_gates_histogram(stub, small):
    for tokens, apart, together in ((5, 3, 3), (200, 5, 4), (1500, 5, 4)):  # the sort copies rows, too
        x = rows(tokens)
        assert [launches(stub, lambda x=x: small(x)) for _ in range(4)] == [apart] * 2 + [together] * 2
        assert small(x.view(tokens, 1, D)).shape == (tokens, 1, D)


def test_gate_and_learners_in_one_operator_start_what_kept_plans_start_but_behind_a_norm(stub, small):
    for tokens, apart, together in ((5, 3, 3), (200, 5, 4)):
        call, options = gated_call(small, rows(tokens))
        assert [launches(stub, lambda c=call, o=options: GATED(*c, **o)) for _ in range(3)] == [apart, *[together] * 2]
        normed = options | {"norm_eps": 1e-5}
        assert [launches(stub, lambda c=call, o=normed: GATED(*c, **o)) for _ in range(3)] == [apart] * 3
        with pytest.raises(UsageError, match="norm_bias"):  # which no norm reads
            GATED(*call._replace(norm_bias=torch.zeros(D, dtype=torch.bfloat16)), **options)


def test_a_whole_acm_takes_the_usual_way_where_anything_has_a_say(small):
    x = rows(7)
    for _ in range(3):
        small(x)
    assert sites.run_site(small, x) is not None
    assert sites.run_site(small, x[:, ::1].t().contiguous().t()) is None  # rows that are not contiguous
    with torch.enable_grad():
        assert sites.run_site(small, x) is None
    with torch.autocast("cpu"):
        assert sites.run_site(small, x) is None
    small.split = lambda operator: operator  # as processes have that hold a part of the learners each
    assert sites.run_site(small, x) is None
    small.split = None
    small.tap = lambda *_: None
    assert sites.run_site(small, x) is None
    small.tap = None
    small.gate.rule = "logits"
    assert sites.run_site(small, x) is None  # another gate than before


def test_another_kind_of_acm_takes_the_usual_way(small):
    class Other(type(small)):
        def choose(self, x_TD, shape, said=None):
            return torch.ones(len(x_TD), dtype=torch.int32)

    x = rows(7)
    for _ in range(3):
        small(x)
    small.__class__ = Other
    assert sites.run_site(small, x) is None
    small.set_choices(knob=0.0, k_lo=1, k_hi=1)
    assert sites.run_site(small, x) is None


def test_one_k_for_all_starts_no_kernel_of_ours(stub, small):
    small.set_choices(knob=0.0, k_lo=2, k_hi=2)
    assert launches(stub, lambda: small(rows(7))) == 0
    small.set_choices(knob=0.0, k_lo=1, k_hi=2)
    assert launches(stub, lambda: small(rows(7))) == 3


def test_one_token_at_one_k_starts_the_kernels_of_both_layers(stub, small, monkeypatch):
    monkeypatch.setattr(ops, "VECTOR_KERNELS", {"cpu"})
    for k, expected in ((2, 2), (3, 2), (0, 0)):  # of none b_out(0) alone is copied
        small.set_choices(knob=0.0, k_lo=k, k_hi=k)
        assert [launches(stub, lambda: small(rows(1))) for _ in range(3)] == [expected] * 3
        assert launches(stub, lambda: small(rows(2))) == 0
    started, start_one = [], FewPlan.__call__
    monkeypatch.setattr(FewPlan, "__call__", lambda *given: started.append(given[2]) or start_one(*given))
    small.set_choices(knob=0.0, k_lo=2, k_hi=2)
    x = rows(1)
    for is_capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda told=is_capturing: told)
        small(x)
    small.set_choices(knob=0.0, k_lo=1, k_hi=3)
    assert [int(k) for k in started] == [1, 2]  # a bound that is followed, and a k that a CUDA graph keeps
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    small.k_lo.fill_(9)
    small.k_hi.fill_(9)  # beyond the last: all learners run, by products
    torch.testing.assert_close(small(x), prefix_output(x, small.learners.weights(), 3))


def test_bounds_that_a_host_writes_or_puts_there_by_itself_are_followed(stub, small, monkeypatch):
    small.set_choices(knob=0.0, k_lo=2, k_hi=2)
    x = rows(7)
    small(x)
    small.k_lo.fill_(1)
    assert launches(stub, lambda: small(x)) == 3  # a choice: gate and learners
    small.k_hi = torch.ones((), dtype=torch.int32)
    assert launches(stub, lambda: small(x)) == 0
    torch.testing.assert_close(small(x), prefix_output(x, small.learners.weights(), 1))
    asked = []
    monkeypatch.setattr(small, "run_time", lambda: asked.append(1))
    small(x)
    assert not asked  # nothing was written since
    small.k_hi.fill_(3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert sites.run_site(small, x) is None and not asked


def test_weights_written_in_place_keep_their_plan_and_others_get_one(small):
    x = rows(7)
    for _ in range(3):
        small(x)
    small.learners.w_in.data.mul_(2)
    assert sites.run_site(small, x) is not None
    small.learners.w_in.data = small.learners.w_in.data.clone()
    assert sites.run_site(small, x) is None
    weights = small.learners.weights().tensors
    assert kept.find_plan(weights, "any") is None
    small.learners.b_in = torch.nn.Parameter(small.learners.b_in.data.clone())
    assert sites.run_site(small, x) is None


def test_plans_go_when_their_weights_go(stub):
    acm = mlp(D, learners=3, gate=16, width=64)
    for _ in range(3):
        acm(rows(7))
    numbers = {id(acm.learners.w_in), id(acm.gate.inner.weight)}
    assert numbers <= set(kept._KEPT) and id(acm) in sites._SITES
    place = id(acm)
    del acm
    gc.collect()
    assert place not in sites._SITES and not numbers & set(kept._KEPT)


def test_copies_of_weights_are_not_kept(small):
    wide = torch.zeros(3, 64, 2 * D, dtype=torch.bfloat16)[..., :D]
    small.learners.w_in.data = wide
    for _ in range(3):
        small(rows(7))
    assert kept._KEPT.get(id(small.learners.w_in)) is None


@pytest.mark.slow
def test_nothing_is_compiled_after_warm_up_whatever_the_number_of_tokens(stub, compiled):
    small = mlp(D, learners=2, gate=16, width=64)
    assert warm_up([small]) == 2 * len(buckets()) and len(set(compiled)) == 10 - puts_fences()
    assert warm_up([small]) == 0
    count = len(compiled)
    for tokens in (1, 2, 15, 16, 17, 33, 64, 65, 129, 1023, 1024, 1025, 2048, 2049, 5000, 300_000):
        for _ in range(3):
            small(torch.empty(tokens, D, dtype=torch.bfloat16))
    assert len(compiled) == count


@pytest.mark.parametrize("is_free", [False, True], ids=["fixed", "free"])
def test_a_graph_holds_launches_which_write_their_results_alone(small, is_free):
    call, options = gated_call(small, rows(100))
    graph, environment = traced_graph(call, options, is_free=is_free)
    nodes = [node for node in graph.graph.nodes if node.target is triton_kernel_wrapper_functional]
    assert "torch.ops.acm" not in graph.code
    written = [node.kwargs["tensors_to_clone"] for node in nodes]
    gate = ["k_out", "histogram"]  # which the sort then reads
    copies = [] if puts_fences() else [["rows_out"]]  # rows in sorted order
    # torch takes the counts for written, too: places of results follow from them
    assert written == [gate, ["perm", "counts"], *copies, ["h", "counts"], ["y", "counts"]]
    assert ("sym_size" in graph.code) == is_free
    assert not environment.guards  # one graph for any number of tokens
    blocks = nodes[-1].kwargs["tma_descriptor_metadata"]
    assert set(blocks) == {"a", "w"} and all(kind == "stable" for kind, _ in blocks.values())


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch runs the kernels to write the code")
@pytest.mark.parametrize(
    ("tokens", "is_free", "launches"), [(1, False, 3), (9, False, 3), (1500, False, 4), (100, True, 4)]
)
def test_a_package_starts_kernels_without_python(small, tokens, is_free, launches):
    call, options = gated_call(small, rows(tokens))
    code = packages_code(*traced_graph(call, options, is_free=is_free))
    assert "acm::" not in code and len(re.findall(r"^ +call_\w+_kernel_\d\(", code, re.MULTILINE)) == launches


def test_a_graph_of_few_tokens_holds_launches_and_one_with_a_norm_the_operator(small):
    call, options = gated_call(small, rows(9))
    graph, _ = traced_graph(call, options | {"norm_eps": 1e-5})
    assert "torch.ops.acm.gated_learners" in graph.code and "triton" not in graph.code
    graph, _ = traced_graph(call, options)
    names = [node.kwargs["tensors_to_clone"] for node in graph.graph.nodes if "tensors_to_clone" in node.kwargs]
    assert names == [["k_out"], ["h"], ["y"]]


@pytest.mark.parametrize("is_free", [False, True], ids=["fixed", "free"])
@pytest.mark.parametrize("k_min", [None, 0], ids=["fixed choice", "relaxed choice"])
def test_a_graph_of_a_step_holds_the_launches_of_its_backward(small, is_free, k_min):
    """Launches of forward and backward in their order."""
    graph = traced_step(small, rows(100), is_free=is_free, k_min=k_min)
    assert "torch.ops.acm" not in graph.code
    nodes = [node for node in graph.graph.nodes if node.target is triton_kernel_wrapper_functional]
    written = [node.kwargs["tensors_to_clone"] for node in nodes]
    copies = 1 - puts_fences()
    assert written[2 + copies : 4 + copies] == [["h", "counts"], ["y", "counts"]]
    backward = [names for names in written[4 + copies :] if "histogram" not in names and "perm" not in names]
    assert backward[:2] == [["rows_out"]] * 2
    if k_min is None:
        assert [sorted(names) for names in backward[2:4]] == [["counts", "h", "reached", "sums"], ["total"]]
    else:
        assert sorted(backward[4]) == ["h", "of_first", "reach"]
    rest = backward[4 if k_min is None else 5 :]
    assert rest[0] == ["y", "counts"] and ["total"] in rest and ["parts"] in rest


def test_a_step_by_kept_plans_sorts_once_and_starts_the_same_kernels_each_time(stub, small, monkeypatch):
    """The backward: two copies in order, what reaches h, its activation, biases, tokens, weights, b_out, and totals."""
    monkeypatch.setattr(sorted_tokens, "_LEAST", 1)
    x = rows(100).requires_grad_()
    small.gate.requires_grad_(False)
    small.train()
    counts = []
    with torch.enable_grad():
        for _ in range(4):
            before = stub.stub_launches()
            y = small(x)
            forward = stub.stub_launches()
            y.sum().backward()
            counts.append((forward - before, stub.stub_launches() - forward))
    assert counts[-2:] == [(4, 13)] * 2
    assert counts[0][1] == 13  # of operators: one launch of the first layer and one of biases, but they sort again
    assert x.grad is not None and small.learners.w_in.grad is not None
    small.eval()


def test_what_triton_cannot_build_stays_an_operator_in_graphs(small, monkeypatch):
    def fail(*_, **__):
        raise OutOfResources(300_000, 101_376, "shared memory")

    monkeypatch.setattr(gpu, "UNBUILT", {})
    monkeypatch.setattr(traced, "_BUILT", set())
    monkeypatch.setattr(JITFunction, "warmup", fail)
    graph, _ = traced_graph(*gated_call(small, rows(100)))
    assert "torch.ops.acm.gated_learners" in graph.code and "triton" not in graph.code
    assert any("out of resource" in reason for reason in gpu.UNBUILT.values())


def test_a_large_gate_is_split_whatever_the_tokens(stub):
    acm = mlp(2048, learners=2, gate=300, width=16)
    x = torch.randn(5, 2048, dtype=torch.bfloat16)
    assert [launches(stub, lambda: acm(x)) for _ in range(3)] == [4] * 3
    x = torch.randn(100, 2048, dtype=torch.bfloat16)
    # parts, sum, sort, two layers; at first a count
    assert [launches(stub, lambda: acm(x)) for _ in range(3)] == [6, 6, 5]


@pytest.mark.slow
def test_inductor_starts_the_kernels_itself(stub, small):
    call, options = gated_call(small, rows(1500))
    code = inductors_code(*traced_graph(call, options))
    assert "acm." not in code.split("def call")[1]
    started = re.findall(r"(\w+_kernel)_\d+\.run\(", code)
    assert started == [
        "gate_kernel",
        "place_kernel",
        *([] if puts_fences() else ["permute_kernel"]),
        "layer1_kernel",
        "layer2_kernel",
    ]
    given = [tensor for tensor in call if tensor is not None]
    assert "clone" not in code and "copy_" not in code  # of what torch takes for written
    with loaded(code) as run:
        run(list(given))
        assert launches(stub, lambda: run(list(given))) == len(started)


def test_a_profiler_of_triton_hears_of_every_launch(small):
    x, heard = rows(7), []
    for _ in range(3):
        small(x)
    hook = start.knobs.runtime.launch_enter_hook
    with mock.patch.object(hook, "calls", [lambda facts: heard.append(facts.get()["name"])]):
        small(x)
    assert heard == ["gate_kernel", "few1_kernel", "few2_kernel"]
