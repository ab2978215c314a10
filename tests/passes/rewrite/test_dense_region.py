"""The replaced computation, from the original parameters, however they are stored."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acm_compiler.errors import PlanMismatch
from acm_compiler.passes.rewrite.dense_region import DenseRegion, check_tensors, tensor_names, weights_digest
from acm_compiler.site import Graft, LinearRef, Site

D, H, O = 6, 10, 4  # noqa: E741
GRAFT = Graft(kind="R", modules=("",))


def mlp(**changes) -> Site:
    """An MLP site 6 -> 10 -> 4 of plain linears a and b."""
    values = {
        "name": "mlp",
        "kind": "mlp",
        "d_in": D,
        "d_out": O,
        "dense_width": H,
        "act": "gelu",
        "first": (LinearRef(weight="a.weight", bias="a.bias"),),
        "last": LinearRef(weight="b.weight", bias="b.bias"),
        "tokens": 5,
        "graft": GRAFT,
    }
    return Site(**values | changes)


def params(**shapes) -> dict[str, nn.Parameter]:
    """Random parameters by name; `__` stands for a dot."""
    return {name.replace("__", "."): nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


PLAIN = {"a__weight": (H, D), "a__bias": (H,), "b__weight": (O, H), "b__bias": (O,)}


def test_a_plain_mlp_shares_the_very_parameters():
    tensors, x = params(**PLAIN), torch.randn(2, 3, D)
    region = DenseRegion(mlp(), tensors)
    hidden = F.gelu(F.linear(x, tensors["a.weight"], tensors["a.bias"]))
    assert torch.equal(region(x), F.linear(hidden, tensors["b.weight"], tensors["b.bias"]))
    assert {id(p) for p in region.parameters()} == {id(p) for p in tensors.values()}
    assert region.held() == tensors


def test_weights_stored_transposed_are_used_as_they_are():
    site = mlp(
        first=(LinearRef(weight="a.weight", bias="a.bias", transposed=True),),
        last=LinearRef(weight="b.weight", transposed=True),
        act="relu",
    )
    tensors, x = params(a__weight=(D, H), a__bias=(H,), b__weight=(H, O)), torch.randn(7, D)
    expected = torch.relu(x @ tensors["a.weight"] + tensors["a.bias"]) @ tensors["b.weight"]
    torch.testing.assert_close(DenseRegion(site, tensors)(x), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_packed_gated_mlp_takes_each_branch_from_its_rows(transposed):
    packed = {"weight": "ab", "bias": "c", "transposed": transposed}
    site = mlp(
        kind="gated_mlp",
        act="silu",
        first=(LinearRef(rows=(H, 2 * H), **packed), LinearRef(rows=(0, H), **packed)),
        last=LinearRef(weight="d"),
    )
    tensors, x = params(ab=(D, 2 * H) if transposed else (2 * H, D), c=(2 * H,), d=(O, H)), torch.randn(3, D)
    weight = tensors["ab"].t() if transposed else tensors["ab"]
    value, gate = F.linear(x, weight, tensors["c"]).chunk(2, dim=-1)
    region = DenseRegion(site, tensors)
    torch.testing.assert_close(region(x), F.linear(F.silu(gate) * value, tensors["d"]))
    assert len(list(region.parameters())) == 3


def test_a_linear_site_may_be_rows_of_a_packed_weight():
    ref = LinearRef(weight="qkv", bias="bias", rows=(O, 2 * O))
    site = mlp(kind="linear", dense_width=None, act="identity", first=(ref,), last=None)
    tensors, x = params(qkv=(3 * O, D), bias=(3 * O,)), torch.randn(3, D)
    expected = F.linear(x, tensors["qkv"], tensors["bias"])[:, O : 2 * O]
    torch.testing.assert_close(DenseRegion(site, tensors)(x), expected)
    assert tensor_names(site) == ["qkv", "bias"]


def test_a_frozen_buffer_can_be_a_weight():
    tensors = params(**PLAIN)
    tensors["a.weight"] = torch.randn(H, D)
    region = DenseRegion(mlp(), tensors)
    assert [name for name, _ in region.named_buffers()] == ["first_weight"]
    assert region.to(torch.float64).first_weight.dtype == torch.float64


def as_model(tensors) -> nn.Module:
    """A module that holds `tensors` under their names."""
    model = nn.Module()
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        if owner and not hasattr(model, owner):
            model.add_module(owner, nn.Module())
        model.get_submodule(owner).register_parameter(leaf, tensor)
    return model


def test_parameters_that_are_missing_or_of_another_size_are_named():
    model = as_model(params(**PLAIN))
    check_tensors([mlp()], model)
    with pytest.raises(PlanMismatch, match=r"mlp: .*found b\.gone"):
        check_tensors([mlp(last=LinearRef(weight="b.gone"))], model)
    with pytest.raises(PlanMismatch, match=r"found \[\(10, 6\), \(4, 10\)\], expected \[\(10, 6\), \(5, 10\)\]"):
        check_tensors([mlp(d_out=5)], model)


def test_the_digest_follows_values_and_names_but_not_the_floating_type():
    model = as_model(params(**PLAIN))
    digest = weights_digest([mlp()], model)
    assert digest == weights_digest([mlp(), mlp()], model)
    assert weights_digest([mlp()], as_model(dict(model.named_parameters())).to(torch.bfloat16)) == digest
    assert weights_digest([dataclasses.replace(mlp(), last=LinearRef(weight="b.weight"))], model) != digest
    model = as_model(params(**PLAIN))
    first = weights_digest([mlp()], model)
    with torch.no_grad():
        model.get_parameter("b.weight")[-1, -1] += 1
    assert first != digest and weights_digest([mlp()], model) not in (first, digest)


def test_a_model_without_values_has_no_digest():
    assert weights_digest([mlp()], as_model(params(**PLAIN)).to("meta")) is None
