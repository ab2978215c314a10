"""Methods on the tokens or blocks of a vision transformer: the models that they know, sizes and MACs."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from acm_compiler.baselines.method import Method
from acm_compiler.baselines.vit_steps import KNOWN, kind_of
from acm_compiler.data import Batch
from acm_compiler.planning.plan import Plan
from acm_compiler.sources.inputs import Inputs, split_inputs

Count = TypeVar("Count", int, Tensor)


class Sizes(NamedTuple):
    """Sizes of a transformer: its blocks, their width, the hidden width of their MLPs, and the tokens of an example."""

    blocks: int
    width: int
    hidden: int
    tokens: int


def why_not(model: nn.Module) -> str | None:
    """A reason for all models but vision transformers that are known here."""
    kind, name = kind_of(model), f"{type(model).__name__} of {type(model).__module__}"
    if kind is None:
        return f"it acts on {', '.join(kind.known for kind in KNOWN)}, and this is a {name}"
    if (lacks := kind.lacks(model)) is not None:
        return lacks
    sizes, block = sizes_of(model), kind.blocks_of(model)[0]
    weights = sum(weight.numel() for weight in block.parameters() if weight.ndim == 2)
    is_plain = weights == 4 * sizes.width**2 + 2 * sizes.width * sizes.hidden  # as `layer_macs` counts
    return None if is_plain else f"the blocks of this {name} are not attention and an MLP of two layers"


def sizes_of(model: nn.Module) -> Sizes:
    """Sizes of a vision transformer."""
    kind = kind_of(model)
    assert kind is not None
    blocks = kind.blocks_of(model)
    last = [part for part in blocks[0].modules() if isinstance(part, nn.Linear)][-1]
    return Sizes(len(blocks), last.out_features, last.in_features, kind.tokens_of(model))


class OnVit(Method):
    """Acts on the tokens or blocks of a vision transformer."""

    @classmethod
    def refuses(cls, model: nn.Module, plan: Plan) -> str | None:
        """A reason for all models but known vision transformers."""
        if type(model).__name__.endswith("ForCTC"):
            return "it runs fewer tokens, and CTC reads a label from every frame"
        return why_not(model)

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """One block for all tokens, and what lies outside of the blocks."""
        return cls.outside_share(model, plan) + cls.block_share(model, plan)

    @staticmethod
    def block_share(model: nn.Module, plan: Plan) -> float:
        """The share of the dense MACs that one block takes."""
        return block_macs(model, sizes_of(model).tokens) / (plan.model.dense_macs / plan.model.batch)

    @classmethod
    def outside_share(cls, model: nn.Module, plan: Plan) -> float:
        """The share of the dense MACs outside of the blocks."""
        return 1 - sizes_of(model).blocks * cls.block_share(model, plan)

    def image(self, batch: Batch) -> Tensor:
        """The images of a batch."""
        return image_of(self.subject.task.inputs(batch))


def image_of(inputs: Inputs) -> Tensor:
    """The images among the arguments of a model's call."""
    args, kwargs = split_inputs(inputs)
    return next(value for value in (*args, *kwargs.values()) if value.ndim == 4)


def block_macs(model: nn.Module, tokens: Count) -> Count:
    """Multiply-adds of one block for so many tokens of each image."""
    sizes = sizes_of(model)
    return layer_macs(sizes.width, sizes.hidden, tokens)


def layer_macs(width: int, hidden: int, tokens: Count) -> Count:
    """Multiply-adds of attention and an MLP of two layers for so many tokens of each example."""
    return tokens * (4 * width**2 + 2 * width * hidden) + 2 * tokens**2 * width


def mlp_macs(model: nn.Module) -> int:
    """Multiply-adds of an MLP for one token."""
    sizes = sizes_of(model)
    return 2 * sizes.width * sizes.hidden
