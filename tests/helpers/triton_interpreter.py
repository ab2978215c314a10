"""Triton's interpreter as tests need it: loops that run under old versions, and a language patched once a launch."""

from __future__ import annotations

import functools
import inspect

import triton.language as tl
from triton.runtime import interpreter

from acm_compiler.codegen.gpu.stages import puts_fences


@functools.cache
def prepare() -> None:
    """Change the interpreter of this process, once."""
    _patch_once_a_launch()
    if not puts_fences():
        _mend_loops()


def _patch_once_a_launch() -> None:
    """Skip what the interpreter does again at every call of a device function, for a third of its time.

    It puts its own functions in place of the language's when a kernel starts and when a device function is called, and
    the language's back when the kernel ends. Device functions find the former's still there.
    """
    patch, patched = interpreter._patch_lang, set()

    @functools.cache
    def languages(function) -> frozenset[int]:
        found = (value for value in function.__globals__.values() if inspect.ismodule(value))
        return frozenset(id(module) for module in found if module in (tl, tl.core))

    def patch_new(function):
        if languages(function) <= patched:
            return interpreter._LangPatchScope()
        patched.update(languages(function))
        scope = patch(function)
        restore = scope.restore

        def end() -> None:
            restore()
            patched.clear()

        scope.restore = end
        return scope

    interpreter._patch_lang = patch_new


def _mend_loops() -> None:
    """Turn loop bounds into integers, which Triton before 3.7 cannot with a recent NumPy."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patched
