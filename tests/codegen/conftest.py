"""The compiled CPU kernel, with and without the processor's tile registers."""

import ctypes

import pytest

from acm_compiler.acm import ops
from acm_compiler.codegen.cpu import build


@pytest.fixture(scope="module")
def library():
    """The compiled kernel, in charge."""
    ops.load_kernels("cpu")
    library = ctypes.CDLL(str(build.library_file()))
    library.acm_want_tiles.restype = ctypes.c_bool
    yield library
    library.acm_want_tiles(True)


@pytest.fixture(params=[True, False], ids=["tiles", "vectors"])
def tiles(request, library):
    if not library.acm_want_tiles(request.param) and request.param:
        pytest.skip("the processor has no tiles")


@pytest.fixture
def with_tiles(library):
    if not library.acm_want_tiles(True):
        pytest.skip("the processor has no tiles")
