"""Recordings of a live model: calls, module calls, parameters, writes, values read."""

import operator
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from acm_compiler.passes.capture.capture import Capture, ModuleCall, capture, record
from acm_compiler.passes.capture.live_tensors import alias_of, overwritten
from tests.helpers.captures import Block, D, H, calls, depends, node_of, result_of


def test_calls_carry_shapes_parameters_module_calls_and_the_users_line():
    model = nn.Sequential(Block())
    found = capture(model, torch.randn(3, 5, D))
    assert found.method == "recorder" and found.inputs == ("arg0",)
    assert calls(found) == ["layer_norm", "linear", "gelu", "linear", "dropout", "add"]
    linear = node_of(found, "linear")
    assert linear.meta["shape"] == (3, 5, H) and linear.meta["dtype"] == torch.float32
    assert linear.meta["stack"] == (ModuleCall("0", 0), ModuleCall("0.up", 0))
    assert linear.meta["source"].startswith("captures.py:")
    assert linear.args[1].op == "get_attr" and linear.args[1].meta["param"] == "0.up.weight"
    assert node_of(found, "gelu").meta["stack"] == (ModuleCall("0", 0),)
    assert result_of(found) is node_of(found, "add")
    found.graph.lint()
    assert "torch._C._nn.linear" in str(found.graph)


def test_signatures_name_the_nodes_that_go_in_and_come_out():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.inner((x, y), None, flag=True, scale=2.0)[0]

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, pair, mask, flag, scale):
            assert mask is None and flag
            return self.linear(pair[0]) * scale, pair[1]

    found = capture(Outer(), (torch.randn(2, D), torch.randn(2, D)))
    inner, linear = found.signatures[ModuleCall("inner", 0)], found.signatures[ModuleCall("inner.linear", 0)]
    assert (inner.inputs, inner.others, inner.keywords) == (("arg0", "arg1"), 3, ("flag", "scale"))
    assert inner.output is None
    assert (linear.inputs, linear.others, linear.output) == (("arg0",), 0, "linear")


def test_a_region_can_be_run_again_from_its_nodes():
    model, x = Block().eval(), torch.randn(3, D)
    found = capture(model, x)
    values = {node_of(found, "layer_norm"): model.norm(x)}
    for node in (node_of(found, "linear"), node_of(found, "gelu"), node_of(found, "linear", 1)):
        for used in node.all_input_nodes:
            if used.op == "get_attr":
                values[used] = model.get_parameter(used.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: values[used])
        values[node] = node.target(*args, **kwargs)
    torch.testing.assert_close(values[node], model.down(F.gelu(model.up(model.norm(x)))))


def test_a_block_called_twice_has_one_path_and_two_calls():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.alias = self.block

        def forward(self, x: Tensor) -> Tensor:
            return self.alias(self.block(x))

    found = capture(Shared(), torch.randn(2, D))
    stacks = [node_of(found, "linear", i).meta["stack"] for i in (0, 2)]
    assert stacks[0] == (ModuleCall("block", 0), ModuleCall("block.up", 0))
    assert stacks[1] == (ModuleCall("block", 1), ModuleCall("block.up", 1))
    weights = [node_of(found, "linear", i).args[1] for i in (0, 2)]
    assert weights[0] is weights[1]


def test_tied_and_parametrized_weights_go_by_their_first_registered_name():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(D, D)
            self.head = nn.Linear(D, D, bias=False)
            self.head.weight = self.embed.weight
            self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, D))

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.normed(self.embed(ids)))

    found = capture(Tied(), torch.arange(4))
    names = {node.meta["param"] for node in found.graph.nodes if node.op == "get_attr"}
    assert "embed.weight" in names and "head.weight" not in names
    assert "normed.parametrizations.weight.original1" in names and "normed.weight" not in names
    assert calls(found) == ["embedding", "_weight_norm", "linear", "linear"], "the hooks record nothing themselves"


def test_buffers_constants_and_what_follows_from_them_are_told_from_inputs():
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(D))
            self.plain = torch.full((D,), 2.0)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table + (self.plain * torch.arange(D))

    model = Tables()
    found = capture(model, torch.randn(3, D))
    metas = {node.target: node.meta for node in found.graph.nodes if node.op == "get_attr"}
    assert metas["table"]["is_buffer"] and metas["table"]["param"] == "table" and not metas["table"]["const"]
    assert metas["_const0"]["const"] and metas["_const0"]["value"] is model.plain
    assert node_of(found, "arange").meta["const"] and node_of(found, "mul", 1).meta["const"]
    assert not node_of(found, "mul").meta["const"] and not node_of(found, "add").meta["const"]


def test_operations_that_give_their_operand_back_are_nodes_of_their_own():
    class NoOps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x.contiguous().to(x.dtype), 0.5, self.training) + x

    found = capture(NoOps(), torch.randn(3))
    assert calls(found) == ["contiguous", "to", "dropout", "add"]
    assert [used.name for used in node_of(found, "add").args] == ["dropout", "arg0"]


def test_properties_are_recorded_by_their_name_and_several_results_one_by_one():
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first, second = x.mT.chunk(2)
            return torch.max(first, dim=-1).values + second.sum()

    found = capture(Views(), torch.randn(2, 4, 3))
    assert node_of(found, "getattr").args[1] == "mT" and node_of(found, "getattr").meta["shape"] == (2, 3, 4)
    assert node_of(found, "chunk").meta["shape"] is None
    first = node_of(found, "max").args[0]
    assert first.target is operator.getitem and first.meta["shape"] == (1, 3, 4)


def test_writes_make_new_values_and_reach_views_of_the_same_memory():
    class Writes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x * 2
            first = x[:, 0]
            first.add_(y)
            return x + 1

    found = capture(Writes(), (torch.randn(2, 3), torch.randn(2)))
    assert depends(result_of(found), found.graph.find_nodes(op="placeholder")[1])
    old, write = node_of(found, "overwritten").args
    assert old is node_of(found, "mul") and write is node_of(found, "add_")

    class Assigns(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.clone()
            x[:, 0] = y
            x += 1
            return F.relu(x, inplace=True)

    found = capture(Assigns(), (torch.randn(2, 3), torch.randn(2)))
    assert calls(found) == ["clone", "__setitem__", "add_", "relu"]
    assert depends(result_of(found), node_of(found, "__setitem__"))
    assert node_of(found, "__setitem__").meta["shape"] == (2, 3)


def test_tensors_made_out_of_sight_are_known_by_the_memory_they_share():
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(lambda row: self.linear(row) * 2)(x)

    for fake in (True, False):
        found = record(Mapped(), torch.randn(3, D), fake=fake)
        assert isinstance(found, Capture)
        assert result_of(found).target is alias_of
        assert depends(result_of(found), node_of(found, "linear"))
        assert depends(node_of(found, "linear"), found.graph.find_nodes(op="placeholder")[0])


def test_values_read_into_python_are_nodes_without_a_shape():
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum().item() > 0 else x - 1

    found = capture(Reads(), torch.ones(3))
    assert found.method == "recorder" and calls(found) == ["sum", "item", "mul"]
    assert node_of(found, "item").meta["shape"] is None
    assert calls(capture(Reads(), -torch.ones(3))) == ["sum", "item", "sub"]


def test_inputs_and_outputs_may_be_nested():
    @dataclass
    class Pair:
        left: Tensor
        right: Tensor | None = None

    class Nested(nn.Module):
        def forward(self, pair: Pair, *, extra: dict):
            assert pair.right is not None
            return {"sum": pair.left + pair.right, "rest": [Pair(extra["deep"][0] * 2), 3]}

    given = {"pair": Pair(torch.ones(2), torch.ones(2)), "extra": {"deep": [torch.ones(3)]}}
    for inputs in (given, UserDict(given)):
        found = capture(Nested(), inputs)
        assert found.inputs == ("pair", "pair_1", "extra")
        assert [n.name for n in found.graph.output_node().args[0]] == ["add", "mul"]


def test_a_tensor_given_twice_stays_one_tensor():
    class Same(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return query * 2 if query is key else query - key

    x = torch.randn(2)
    for fake in (True, False):
        assert calls(record(Same(), (x, x), fake=fake)) == ["mul"]
        assert calls(record(Same(), (x, x.clone()), fake=fake)) == ["sub"]


def test_layers_dropped_in_training_are_all_seen():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if not (self.training and torch.rand([]) < 0.9):
                    x = layer(x)
            return x

    assert calls(capture(Dropping().train(), torch.randn(2, D))).count("linear") == 12


def test_autograd_functions_and_checkpointed_parts_are_seen_through():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return Double.apply(torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False))

    found = calls(capture(Wrapped(), torch.randn(2, D)))
    assert [call for call in found if call != "empty"] == ["linear", "mul"]  # torch 2.11 checkpoints by an empty tensor


def test_a_part_that_was_compiled_is_recorded_as_the_eager_code():
    model = nn.Sequential(Block(), Block())
    model[1].compile(backend="eager")
    wrapped = nn.Sequential(torch.compile(Block(), backend="eager"))
    assert calls(capture(model, torch.randn(2, D))).count("linear") == 4
    assert calls(capture(wrapped, torch.randn(2, D))).count("linear") == 2


def test_an_overwritten_value_cannot_be_run_by_mistake():
    with pytest.raises(NotImplementedError):
        overwritten(torch.ones(1), torch.ones(1))
