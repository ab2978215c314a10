"""Models that do unusual things: each is converted right, or left alone with words that say what to do."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import acm_compiler as acm
from acm_compiler.acm import ACM
from acm_compiler.errors import CaptureFailed, UsageError
from tests.helpers.models import HIDDEN, WIDTH, Mlp, Residual, Stack, example


class Inner(nn.Module):
    """A norm and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def branch(self, x):
        return self.mlp(self.norm(x))


class ControlFlow(Inner):
    def forward(self, x):
        return x if x.mean() > 1e9 else x + self.branch(x)


class Loop(Inner):
    def forward(self, x):
        for _ in range(int(x.shape[1])):
            x = x + self.branch(x)
        return x


class TokenByToken(Inner):
    def forward(self, x):
        return torch.stack([token + self.branch(token) for token in x.unbind(1)], 1)


class InPlace(Inner):
    def forward(self, x):
        x = x.clone()
        x += self.branch(x)
        return x


class SomeTokens(Inner):
    def forward(self, x):
        chosen, out = x.sum(-1) > 0, x.clone()
        out[chosen] = out[chosen] + self.branch(out[chosen])
        return out


class Checkpointed(Inner):
    def forward(self, x):
        return x + checkpoint(self.branch, x, use_reentrant=False)


class Reentrant(Inner):
    def forward(self, x):
        return x + checkpoint(self.branch, x, use_reentrant=True)


class Functional(Inner):
    def forward(self, x):
        return x + torch.func.functional_call(self.mlp, dict(self.mlp.named_parameters()), (self.norm(x),))


class Vectorised(Inner):
    def forward(self, x):
        return x + torch.func.vmap(self.branch)(x)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.compile(Mlp(), backend="eager")

    def forward(self, x):
        return x + self.mlp(x)


class HeldInAList(nn.Module):
    """One MLP that is not registered anywhere, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.own = [Mlp()], Mlp()

    def forward(self, x):
        return x + self.hidden[0](x) + self.own(x)


class TiedTwins(nn.Module):
    """Two MLPs that share all their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Mlp(), Mlp()
        for name in ("up", "down"):
            linear, twin = getattr(self.one, name), getattr(self.two, name)
            twin.weight, twin.bias = linear.weight, linear.bias

    def forward(self, x):
        x = x + self.one(x)
        return x + self.two(x)


class SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.relu(x).square()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * F.relu(ctx.saved_tensors[0])


def written_gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that scripting is on its way out
        scripted = torch.jit.script(written_gelu)
    return Between(lambda hidden: scripted(hidden))


class Between(nn.Module):
    """A function of its own between the linears."""

    def __init__(self, act) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), act, nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class OwnForward(Inner):
    """The MLP's forward is a function that knows this very MLP."""

    def __init__(self) -> None:
        super().__init__()
        former = self.mlp.forward
        self.mlp.forward = lambda x: former(x) * 1.0

    def forward(self, x):
        return x + self.branch(x)


class MaskedMlp(Mlp):
    """An MLP that takes a mask as well, as blocks do that call all their parts alike."""

    def forward(self, x, mask=None):
        return super().forward(x)


class CalledWithNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MaskedMlp()

    def forward(self, x):
        return x + self.mlp(x, None)


class ScaledLinear(nn.Linear):
    def forward(self, x, scale=None):
        return super().forward(x)


class LinearsCalledWithNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = ScaledLinear(WIDTH, HIDDEN), ScaledLinear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x, None)), None)


CONVERTED = {
    "an MLP called with None beside x": (CalledWithNone, {"blocks.0.mlp.down": 1}),
    "linears called with None beside x": (LinearsCalledWithNone, {"blocks.0.down.weight_acm": 1}),
    "control flow by data": (ControlFlow, {"blocks.0.mlp": 1}),
    "a loop over tokens' number": (Loop, {"blocks.0.mlp": 5}),
    "token by token": (TokenByToken, {"blocks.0.mlp": 5}),
    "in place": (InPlace, {"blocks.0.mlp": 1}),
    "tokens picked by a mask": (SomeTokens, {"blocks.0.mlp": 1}),
    "checkpointed": (Checkpointed, {"blocks.0.mlp": 1}),
    "checkpointed, reentrant": (Reentrant, {"blocks.0.mlp": 1}),
    "functional_call": (Functional, {"blocks.0.mlp": 1}),
    "vmap": (Vectorised, {"blocks.0.mlp": 1}),
    "compiled submodule": (Compiled, {"blocks.0.mlp": 1}),
    "modules in a list": (HeldInAList, {"blocks.0.own": 1}),
    "twins that share their weights": (TiedTwins, {"blocks.0.one": 2}),
    "custom autograd function": (lambda: Between(SquaredRelu.apply), {"blocks.0.down": 1}),
    "jit function": (_scripted, {"blocks.0.down": 1}),
}


@pytest.mark.filterwarnings("ignore")  # of the unusual things themselves
@pytest.mark.parametrize("name", CONVERTED)
def test_an_unusual_model_is_converted_right(name):
    block, sites = CONVERTED[name]
    model, x = Stack(block()).eval(), example()
    plan = acm.plan(model, x)
    assert {site.name: site.calls for site in plan.sites} == sites
    with torch.no_grad():
        copied, expected = acm.rewrite(model, plan), model(x)
        torch.testing.assert_close(copied(x), expected, rtol=1e-5, atol=1e-5)
        acm.set_k(copied, 1)
        assert (copied(x) - expected).abs().max() > 1e-3
        assert torch.equal(acm.revert(copied)(x), expected)


class Autocast(Inner):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.branch(x)
        return x + y.float()


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp().bfloat16()

    def forward(self, x):
        return x + self.mlp(x.bfloat16()).to(x.dtype)


@pytest.mark.parametrize("block", [Autocast, MixedTypes])
def test_a_block_in_half_precision_is_converted_in_half_precision(block):
    model, x = Stack(block()).eval(), example()
    plan = acm.plan(model, x)
    assert [site.name for site in plan.sites] == ["blocks.0.mlp"]
    with torch.no_grad():
        torch.testing.assert_close(acm.rewrite(model, plan)(x), model(x), rtol=1e-2, atol=1e-2)


class CastInside(Mlp):
    """The MLP's own forward changes the type, and back."""

    def forward(self, x):
        return super().forward(x.double()).to(x.dtype)


class CastWeight(nn.Linear):
    """A linear that computes in another type than its weight has."""

    def forward(self, x):
        return F.linear(x.double(), self.weight.double(), self.bias.double()).to(x.dtype)


def test_a_type_that_only_the_inside_of_a_module_has_is_kept():
    model, x = Stack(Residual(CastInside().double())).eval(), example()
    converted = acm.rewrite(model, acm.plan(model, x))
    assert list(acm.sites(converted)) == ["blocks.0.inner.down"]
    torch.testing.assert_close(converted(x), model(x))


def test_a_weight_that_is_used_in_another_type_is_left_dense():
    mlp = Mlp()
    mlp.down = CastWeight(HIDDEN, WIDTH)
    plan = acm.plan(Stack(Residual(mlp)).eval(), example())
    reasons = {skip.name: skip.reason for skip in plan.skipped}
    assert not plan.sites and "torch.float32 and used as torch.float64" in reasons["blocks.0.inner.down"]


class HalfTied(TiedTwins):
    """Two MLPs of which only the first matrices are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.two.down = nn.Linear(HIDDEN, WIDTH)


class Mirrored(nn.Module):
    """The second layer is the first one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Linear(WIDTH, HIDDEN), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x + F.linear(F.relu(self.up(x)), self.up.weight.t(), self.bias)


class Flat(nn.Module):
    """Both matrices are views of one flat parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(0.1 * torch.randn(2 * HIDDEN * WIDTH))

    def forward(self, x):
        up, down = self.flat.chunk(2)
        return x + F.linear(F.relu(F.linear(x, up.view(HIDDEN, WIDTH))), down.view(WIDTH, HIDDEN))


def _normed() -> nn.Module:
    mlp = Mlp()
    nn.utils.parametrizations.spectral_norm(mlp.up)
    return Residual(mlp)


class TwoTypes(nn.Module):
    """The first layer computes in double precision, the second in single."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN).double(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x.double())).float())


def _traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tracing is on its way out
        return Residual(torch.jit.trace(Mlp(), torch.randn(2, 5, WIDTH)))


SKIPPED = {
    "layers of two types": (TwoTypes, "blocks.0.up", "its layers compute in different types: torch.float64"),
    "traced": (_traced, "blocks.0.inner.up.weight", "blocks.0.inner was scripted or traced by TorchScript"),
    "half tied": (HalfTied, "blocks.0.one.up", "weight read as a tensor: blocks.0.one.up.weight is also read by"),
    "mirrored": (Mirrored, "blocks.0.up", "its layers share blocks.0.up.weight"),
    "views of a flat parameter": (Flat, "blocks.0.flat", "its weight is computed from parameters"),
    "parametrized": (_normed, "blocks.0.inner.up", "its weight is computed from parameters"),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_what_no_acm_can_replace_is_left_dense_with_the_reason(name):
    block, skip, reason = SKIPPED[name]
    plan = acm.plan(Stack(block()).eval(), example())
    assert not plan.sites
    assert {entry.name: entry.reason for entry in plan.skipped}[skip].startswith(reason)


def test_quantised_linears_are_left_with_the_advice_to_convert_first():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantisation moved to another package
        model = torch.ao.quantization.quantize_dynamic(Stack(Residual(Mlp())).eval(), {nn.Linear}, dtype=torch.qint8)
        plan = acm.plan(model, example())
    assert not plan.sites
    assert {skip.name: skip.reason for skip in plan.skipped}["blocks.0.inner.up"].startswith(
        "quantised linear: convert"
    )


class Int8Linear(nn.Module):
    """A linear whose weight is a buffer of whole numbers, scaled before the product or after it."""

    def __init__(self, d_in, d_out, how) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("weight", torch.randint(-127, 127, (d_out, d_in), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(d_out) / 100)

    def forward(self, x):
        if self.how == "before":
            return x @ (self.weight.to(x.dtype) * self.scale[:, None]).T
        if self.how == "after":
            return F.linear(x, self.weight.to(x.dtype)) * self.scale
        return torch.ops.aten._weight_int8pack_mm(x.flatten(0, 1), self.weight, self.scale).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("how", ["before", "after", "packed"])
def test_linears_of_whole_numbers_are_skips(how):
    mlp = Mlp()
    mlp.up, mlp.down = Int8Linear(WIDTH, HIDDEN, how), Int8Linear(HIDDEN, WIDTH, how)
    plan = acm.plan(Stack(Residual(mlp)).eval(), example())
    reasons = {skip.name.removesuffix(".weight"): skip.reason for skip in plan.skipped}
    assert not plan.sites and all("quantised linear" in reasons[f"blocks.0.inner.{name}"] for name in ("up", "down"))


def test_a_linear_over_a_buffer_is_a_skip():
    mlp = Mlp()
    weight = mlp.up.weight.detach()
    del mlp.up.weight
    mlp.up.register_buffer("weight", weight)
    plan = acm.plan(Stack(Residual(mlp)).eval(), example())
    assert {skip.name: skip.reason for skip in plan.skipped}["blocks.0.inner.up"].startswith("its weight is a buffer")


class Numpy(Inner):
    def forward(self, x):
        return self.branch(torch.from_numpy(np.tanh(x.detach().numpy())))


def test_a_round_trip_through_numpy_is_named_with_file_and_line():
    with pytest.raises(CaptureFailed, match=r"test_hostile\.py:\d+ uses a \(2, 5, 16\) tensor that no torch call made"):
        acm.plan(Stack(Numpy()).eval(), example())


def test_a_scripted_part_is_named():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that scripting is on its way out
        model = Stack(Residual(torch.jit.script(Mlp()))).eval()
    with pytest.raises(CaptureFailed, match=r"blocks\.0\.inner was scripted from"):
        acm.plan(model, example())


@pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6)])
def test_inputs_without_a_token_are_refused(shape):
    with pytest.raises(UsageError, match=r"at least one token.*found shape"):
        acm.plan(Stack(Residual(Mlp())), torch.randn(shape))


def test_inputs_of_the_wrong_type_give_the_models_own_error():
    with pytest.raises(CaptureFailed, match=r"models\.py:\d+: the model itself raises [\s\S]*same dtype"):
        acm.plan(Stack(Residual(Mlp())).eval(), example().double())


def test_a_forward_that_a_copy_would_share_is_rewritten_in_place_only():
    model, x = Stack(OwnForward()).eval(), example()
    plan = acm.plan(model, x)
    expected = model(x)
    with pytest.raises(UsageError, match=r"blocks\.0\.mlp[\s\S]*inplace=True"):
        acm.rewrite(model, plan)
    acm.rewrite(model, plan, inplace=True)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    acm.set_k(model, 1)
    assert (model(x) - expected).abs().max() > 1e-3


def test_a_model_on_meta_is_planned_and_asked_for_its_weights():
    with torch.device("meta"):
        model = Stack(Residual(Mlp())).eval()
    plan = acm.plan(model, example())
    assert [site.name for site in plan.sites] == ["blocks.0.inner"]
    with pytest.raises(UsageError, match="load its weights"):
        acm.rewrite(model, plan)


@pytest.mark.parametrize("how", ["fully_shard", "module"])
def test_a_sharded_model_is_refused_with_the_order_to_follow(how, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/sync", rank=0, world_size=1)
    try:
        model = Stack(Residual(Mlp())).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about running without an accelerator
            if how == "fully_shard":
                fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            else:
                model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        with pytest.raises(UsageError, match="rewrite it first, then shard it"):
            acm.plan(model, example())
    finally:
        torch.distributed.destroy_process_group()


def test_a_wrapped_model_is_converted_inside_its_wrapper():
    model, x = nn.DataParallel(Stack(Residual(Mlp()))).eval(), example()
    copied = acm.rewrite(model, acm.plan(model, x))
    assert isinstance(copied.module.blocks[0].inner, ACM)
    with torch.no_grad():
        torch.testing.assert_close(copied(x), model(x), rtol=1e-5, atol=1e-5)
