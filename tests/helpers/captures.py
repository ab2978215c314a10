"""A block to be captured, and questions to a capture."""

import torch.nn.functional as F
from torch import Tensor, fx, nn

from acm_compiler.passes.capture.graph import Capture
from acm_compiler.passes.find.dataflow import build_dataflow
from acm_compiler.passes.find.find_sites import match_sites
from acm_compiler.site import Site, Skip

D, H = 8, 12


class Block(nn.Module):
    """A residual MLP with a norm, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, H)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(H, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def calls(found: Capture) -> list[str]:
    """The names of the calls of a capture, in order."""
    return [node.target.__name__ for node in found.graph.nodes if node.op == "call_function"]


def node_of(found: Capture, name: str, number: int = 0) -> fx.Node:
    """The `number`-th call of the function called `name`."""
    nodes = [n for n in found.graph.nodes if n.op == "call_function" and n.target.__name__ == name]
    return nodes[number]


def depends(node: fx.Node, other: fx.Node) -> bool:
    """True if `node` is computed from `other`."""
    return node is other or any(depends(used, other) for used in node.all_input_nodes)


def result_of(found: Capture) -> fx.Node:
    """The only output."""
    (node,) = found.graph.output_node().args[0]
    return node


def find_sites(model: nn.Module, found: Capture) -> tuple[list[Site], list[Skip]]:
    """The sites of `model` in the order of execution, and its look-alikes."""
    matches, skips = match_sites(model, build_dataflow(found))
    return [match.site for match in matches], skips
