"""Triton before 3.7 cannot turn its interpreter's loop bounds into integers with a recent NumPy; this lets it."""

from triton.runtime import interpreter

from acm_compiler.codegen.gpu.stages import puts_fences


def mend_loops() -> None:
    """Let loops run in the interpreter, whatever the versions; nothing to do from Triton 3.7 on."""
    if puts_fences():
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patched
