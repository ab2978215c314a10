"""Activations as text."""

import pytest
import torch
import torch.nn.functional as F

from acm_compiler.acm.activations import NAMES, resolve
from acm_compiler.errors import UsageError


def test_an_expression_means_what_it_says():
    x = torch.linspace(-4, 4, 41)
    torch.testing.assert_close(resolve("mul(x, sigmoid(mul(x, 1.702)))")(x), NAMES["quick_gelu"](x))
    inner = "mul(0.7978845608, add(x, mul(0.044715, pow(x, 3.0))))"
    torch.testing.assert_close(resolve(f"mul(mul(0.5, x), add(1.0, tanh({inner})))")(x), F.gelu(x, approximate="tanh"))
    torch.testing.assert_close(resolve("leaky_relu(x, 0.2)")(x), F.leaky_relu(x, 0.2))
    torch.testing.assert_close(resolve("sub(-1.5, x)")(x), -1.5 - x)


@pytest.mark.parametrize(
    "act", ["geluu", "__import__('os')", "mul(x, y)", "x.numpy()", "mul(1, 2)", "relu(x, inplace=True)", "erf()", ""]
)
def test_anything_else_is_refused(act):
    with pytest.raises(UsageError):
        resolve(act)


def test_the_nearest_name_is_offered():
    with pytest.raises(UsageError, match="did you mean 'gelu'"):
        resolve("gelux")
