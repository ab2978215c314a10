"""The backend as users reach it: by name, with nothing imported."""

import subprocess
import sys

import pytest
import torch

from acm_compiler.control import set_k
from acm_compiler.conversion import sites
from tests.build import planned_site, stack_of

SCRIPT = """
import torch
f = torch.compile(torch.nn.Linear(4, 4), backend="acm")
print(tuple(f(torch.randn(2, 4)).shape))
"""


@pytest.mark.slow
def test_the_backend_is_found_without_an_import():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(2, 4)"


@pytest.mark.filterwarnings("ignore")
def test_a_rewritten_model_compiles_to_the_same_answers_at_every_k(caplog):
    model = stack_of(planned_site("a"), planned_site("b", k_min=1))
    compiled = torch.compile(model, backend="acm", fullgraph=True)
    x = torch.randn(3, 5, 8)
    with torch.no_grad(), caplog.at_level("INFO", logger="acm_compiler.backend"):
        for k in (4, 2, 0):
            set_k(model, k)
            torch.testing.assert_close(compiled(x), model(x))
    assert [record.message for record in caplog.records if "2 ACMs" in record.message] != []
    assert len(sites(compiled)) == 2


@pytest.mark.filterwarnings("ignore")
def test_an_unknown_option_is_refused_with_the_nearest_name():
    compiled = torch.compile(torch.nn.Linear(4, 4), backend="acm", options={"max_autotuen": True})
    with pytest.raises(Exception, match="max_autotune"):
        compiled(torch.randn(2, 4))
