"""A GGUF file in llama.cpp: reading and writing of several texts at once, perplexity, and files with fewer bits.

    python -m benchmarks.llama_cpp_model runs/smollm2 dense.gguf half.gguf      perplexity on a finished run's texts
    python -m benchmarks.llama_cpp_model --quantize half.f16.gguf half.gguf     a file with fewer bits

Needs the package llama-cpp-python; its low-level interface alone is used. A file is one that llama.cpp's own converter
wrote, of a checkpoint that `acmc export --format checkpoint --fixed-k` wrote, or any other.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

import llama_cpp as low
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.errors import AcmError, StorageError
from acm_compiler.runs.opened import SavedRun, open_saved_run

_ROOM = 8  # tokens beyond the longest text


class LlamaCppModel:
    """The model of a file, and a context for so many sequences of so many tokens, with as many threads as torch has."""

    def __init__(self, path: Path, *, sequences: int, tokens: int) -> None:
        _quiet()
        low.llama_backend_init()
        model = low.llama_model_load_from_file(str(path).encode(), low.llama_model_default_params())
        if not model:
            raise StorageError("llama.cpp cannot read this file", where=str(path))
        self.vocabulary = int(low.llama_vocab_n_tokens(low.llama_model_get_vocab(model)))
        params, threads = low.llama_context_default_params(), torch.get_num_threads()
        params.n_ctx, params.n_seq_max = sequences * (tokens + _ROOM), sequences
        params.n_batch = sequences * tokens
        params.n_threads = params.n_threads_batch = threads
        self._context = low.llama_init_from_model(model, params)
        self._memory = low.llama_get_memory(self._context)
        self._batch = low.llama_batch_init(sequences * tokens, 0, sequences)

    def forget(self) -> None:
        """Empty the cache of every sequence."""
        low.llama_memory_clear(self._memory, False)

    def read(self, ids: Sequence[Sequence[int]], *, behind: int = 0, everywhere: bool = False) -> None:
        """Run the tokens of several sequences in one call, behind so many of each; logits of the last, or of all."""
        place = 0
        for sequence, row in enumerate(ids):
            for number, token in enumerate(row):
                self._batch.token[place], self._batch.pos[place] = token, behind + number
                self._batch.n_seq_id[place], self._batch.seq_id[place][0] = 1, sequence
                self._batch.logits[place] = everywhere or number == len(row) - 1
                place += 1
        self._batch.n_tokens = place
        if low.llama_decode(self._context, self._batch):
            raise AcmError("llama.cpp refused a batch", found=f"{place} tokens of {len(ids)} sequences")

    def drop(self, behind: int, sequences: int) -> None:
        """Drop all but so many tokens of each of the first sequences from the cache."""
        for sequence in range(sequences):
            low.llama_memory_seq_rm(self._memory, sequence, behind, -1)

    def logits(self, rows: int) -> Tensor:
        """The logits of the last call, [rows, vocabulary]."""
        found = np.ctypeslib.as_array(low.llama_get_logits(self._context), shape=(rows, self.vocabulary))
        return torch.from_numpy(found.copy())


@low.llama_log_callback
def _say_nothing(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drop a line of llama.cpp's log."""


def _quiet() -> None:
    low.llama_log_set(_say_nothing, ctypes.c_void_p(0))


def perplexity(path: Path, run: SavedRun) -> str:
    """Perplexity on a run's texts, as `acmc eval` counts it."""
    texts = [run.data[number] for number in range(len(run.data))]  # type: ignore[arg-type]
    longest = max(len(text["input_ids"]) for text in texts)
    model = LlamaCppModel(path, sequences=1, tokens=longest)
    losses = []
    for text in texts:
        ids = text["input_ids"]
        model.forget()
        model.read([ids.tolist()], everywhere=True)
        losses.append(F.cross_entropy(model.logits(len(ids))[:-1].double(), ids[1:], reduction="none"))
    loss_T = torch.cat(losses)
    return f"{path.name}: perplexity {float(loss_T.mean().exp()):.2f} of {len(loss_T)} tokens"


def quantize(source: Path, target: Path) -> None:
    """Write the model of one file into another: second layers of MLPs, which were refitted, as Q8_0, the rest as Q4_1.

    The rest of a model that came as Q4_1 has the values of that format already.
    """
    _quiet()
    params = low.llama_model_quantize_default_params()
    params.ftype, params.nthread = low.LLAMA_FTYPE_MOSTLY_Q4_1, torch.get_num_threads()
    refitted = low.llama_model_tensor_override(b"ffn_down", low.GGML_TYPE_Q8_0)
    params.tt_overrides = (low.llama_model_tensor_override * 2)(refitted)  # the last, empty one ends the list
    if low.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise StorageError("llama.cpp cannot quantise this file", where=str(source))


def main() -> None:
    """Print a line for each file, or write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH")
    parser.add_argument("--quantize", action="store_true")
    chosen = parser.parse_args()
    if chosen.quantize:
        quantize(*chosen.paths)
        return
    folder, *files = chosen.paths
    run = open_saved_run(folder)
    for file in files:
        sys.stdout.write(f"{perplexity(file, run)}\n")


if __name__ == "__main__":
    main()
