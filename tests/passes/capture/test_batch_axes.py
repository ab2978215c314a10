"""Batch axes of captured tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.passes.capture.batch_axes import find_layouts
from acm_compiler.passes.capture.capture import Capture, capture, export
from acm_compiler.passes.capture.normalize import normalized
from acm_compiler.site import Layout

D = 8


def linear_inputs(model: nn.Module, inputs) -> list[Layout | None]:
    """The layout of what each linear of the model reads, in order; fails where there are none at all."""
    found = capture(model, inputs)
    layouts = find_layouts(model, inputs, found)
    assert layouts
    return [layouts[n.args[0].name] for n in found.graph.nodes if getattr(n.target, "__name__", "") == "linear"]


class Reshaping(nn.Module):
    """A linear on x after `before`, a function of the module."""

    def __init__(self, before) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(D, D), before

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.before(x))


# the input has three axes: batch, 4 tokens, features
@pytest.mark.parametrize(
    ("before", "layout"),
    [
        (lambda x: x, Layout()),
        (lambda x: x.transpose(0, 1), Layout(batch_axis=1)),
        (lambda x: x[:, 0], Layout()),
        (lambda x: x.reshape(-1, D), Layout(folds=4)),
        (lambda x: x.reshape(-1, 2, D) * 2, Layout(folds=2)),
        (lambda x: torch.cat(x.flatten(0, 1).chunk(2, dim=-1), -1).sin(), Layout(folds=4)),
        (lambda x: x.repeat_interleave(3, dim=0), Layout(folds=3)),
        (lambda x: x[:, None].expand(-1, 5, -1, -1).reshape(-1, 4, D), Layout(folds=5)),
        (lambda x: x.unflatten(1, (2, 2)).transpose(1, 2), Layout()),
        # neighbours in a folded axis belong to different examples
        (lambda x: x.transpose(0, 1).reshape(-1, D), None),
        (lambda x: torch.cat([x, x]), None),
        (lambda x: x.repeat(3, 1, 1), None),
        # values may choose other rows of each example
        (lambda x: x[x.abs().amax((1, 2)) > 0], Layout(folds=0)),
        (lambda x: x[x.abs().amax((1, 2)) > 0].flatten(0, 1).sin(), Layout(folds=0)),
        # a tensor of numbers may hold another one for each example
        (lambda x: x.repeat_interleave(torch.full((len(x),), 3), dim=0), None),
        # then told apart again
        (lambda x: x.transpose(0, 1).reshape(-1, D).reshape(4, -1, D), Layout(batch_axis=1)),
        # sizes that are no multiple of the batch
        (lambda x: F.pad(x, (0, 0, 0, 0, 1, 0)), None),
        # the batch multiplies the batch
        (lambda x: x[:, None] + x[None], None),
        # nothing of the batch is left
        (lambda x: x.mean(0), None),
    ],
)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_batch_axis_and_its_folds_are_found_through_reshapes(before, layout, batch):
    assert linear_inputs(Reshaping(before), torch.randn(batch, 4, D)) == [layout]


def test_inputs_that_belong_to_no_example_stay_as_they_are():
    class Biased(Reshaping):
        def forward(self, x: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
            return self.linear(x + bias) * scale

    model = Biased(None)
    inputs = {"x": torch.randn(2, 4, D), "bias": torch.randn(4, D), "scale": torch.tensor(2.0)}
    given = {name: value.clone() for name, value in inputs.items()}
    assert linear_inputs(model, inputs) == [Layout()]
    assert all(torch.equal(inputs[name], given[name]) for name in given)
    assert find_layouts(model, inputs, capture(model, inputs))["bias"] is None


def test_windows_of_a_swin_are_folds_of_an_example():
    torchvision = pytest.importorskip("torchvision")
    swin = torchvision.models.SwinTransformer([4, 4], D, [2], [2], [2, 2], num_classes=3)
    windows, maps = Layout(folds=4), Layout()
    found = linear_inputs(swin, torch.randn(1, 3, 16, 16))
    assert found[:4] == [windows, windows, maps, maps], "qkv, output, and an MLP on [B, H, W, C]"


def test_unpacked_attentions_read_the_batch_where_their_layout_has_it():
    layer = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True)
    with normalized(nn.TransformerEncoder(layer, 2)) as model:
        assert set(linear_inputs(model, torch.randn(2, 5, D))) == {Layout()}


def test_a_model_whose_first_axis_is_that_of_the_tokens_is_unknown():
    transformer = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 16), 1)
    inputs = (torch.randn(5, 2, D), torch.randn(3, 2, D))
    assert find_layouts(transformer, inputs, capture(transformer, inputs)) == {}
    with normalized(transformer) as model:
        assert find_layouts(model, inputs, capture(model, inputs)) == {}

    class Eager(Reshaping):
        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return (x.transpose(0, 1) @ x.permute(1, 2, 0)).softmax(-1)

    model = Eager(None)
    assert find_layouts(model, torch.randn(5, 2, D), capture(model, torch.randn(5, 2, D))) == {}


class Fixed(Reshaping):
    """Takes one example alone, or two."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.before(x).reshape(-1, 4, D))


def only(batch):
    def before(x):
        if len(x) != batch:
            raise ValueError("another batch size")
        return x

    return before


@pytest.mark.parametrize("before", [only, lambda batch: lambda x: x.exp() if len(x) == batch else x.sin()])
def test_a_model_that_runs_otherwise_for_other_batches_is_unknown_but_for_one_example(before):
    for batch in (1, 2):
        model, x = Fixed(before(batch)), torch.randn(batch, 4, D)
        layouts = find_layouts(model, x, capture(model, x))
        assert set(layouts.values()) == ({Layout(batch_axis=None)} if batch == 1 else set())


def one_by_one(x: Tensor) -> Tensor:
    return torch.cat([image.reshape(-1, D).sin() for image in x.split([1] * len(x))])


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_what_is_done_for_one_example_after_the_other_may_stand_before_a_site(batch):
    model, x = Reshaping(lambda x: one_by_one(x).view(len(x), 4, D)), torch.randn(batch, 4, D)
    assert linear_inputs(model, x) == [Layout()]


def test_a_site_that_is_run_for_one_example_after_the_other_is_unknown_but_for_one_example():
    class Alone(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super(Alone, self).forward(one) for one in x.split(1)])

    for batch in (1, 2):
        model, x = nn.Sequential(Alone(D, D), nn.Linear(D, D)), torch.randn(batch, 4, D)
        layouts = find_layouts(model, x, capture(model, x))
        assert set(layouts.values()) == ({Layout(batch_axis=None)} if batch == 1 else set())


def test_constants_may_be_made_otherwise_for_other_batches():
    class Positioned(Reshaping):
        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[1])[None, :, None]
            return self.linear(x + (places if len(x) == 1 else places.expand(len(x), -1, -1)))

    assert linear_inputs(Positioned(None), torch.randn(1, 4, D)) == [Layout()]


@pytest.mark.parametrize("batch", [1, 2])
def test_causal_language_models_have_layouts_at_every_batch(batch):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 9}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    assert set(linear_inputs(model, {"input_ids": torch.zeros(batch, 5, dtype=torch.long)})) == {Layout()}


def test_inputs_without_axes_have_no_batch():
    model = Reshaping(lambda x: x.expand(4, D))
    assert find_layouts(model, torch.tensor(1.0), capture(model, torch.tensor(1.0))) == {}


def test_a_model_whose_values_decide_its_calls_is_really_run():
    model = Reshaping(lambda x: x.flatten(0, 1) if x.sum().item() > 0 else x)
    assert linear_inputs(model, torch.ones(1, 4, D)) == [Layout(folds=4)]


def test_an_exported_capture_has_layouts_too():
    model, x = Reshaping(lambda x: x.flatten(0, 1)), torch.randn(2, 4, D)
    found = export(model, x)
    assert isinstance(found, Capture)
    linear = next(n for n in found.graph.nodes if n.name == "linear")
    assert find_layouts(model, x, found)[linear.args[0].name] == Layout(folds=4)
