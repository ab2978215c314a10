"""vLLM in a process of its own, because it changes transformers' classes: requests from stdin, texts to stdout.

{"folder": …, "options": {…}, "batches": [[[prompt ids, extra arguments or null], …], …]} -> for each batch the ids
behind each prompt, or the words by which the batch was refused; and how many tokens of each prompt were cached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers import ROOT

_SIZES = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 128}
TOKENS = 12


def run(folder: Path, batches: list[list[Any]], **options: Any) -> list[Any]:
    """Answers of a new engine with `folder` to `batches`, one after the other."""
    return run_cached(folder, batches, **options)[0]


def run_cached(folder: Path, batches: list[list[Any]], **options: Any) -> tuple[list[Any], list[list[int]]]:
    """The same, and how many tokens of each prompt were found in the cache of prefixes."""
    request = {"folder": str(folder), "options": options, "batches": batches}
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.vllm_engine"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=os.environ | own,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers, cached = json.loads(done.stdout.splitlines()[-1])
    return answers, cached


def main() -> None:
    """Answer the requests on stdin; what vLLM prints comes before the line of answers."""
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError

    request = json.load(sys.stdin)
    try:
        engine = LLM(request["folder"], skip_tokenizer_init=True, **_SIZES | request["options"])
    except Exception as error:  # noqa: BLE001  # of any kind, for the test to read
        sys.stdout.write(json.dumps([[f"{type(error).__name__}: {error}"], []]) + "\n")
        return
    answers: list[Any] = []
    cached: list[list[int]] = []
    for batch in request["batches"]:
        params = [
            SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, extra_args=extra)
            for _, extra in batch
        ]
        try:
            outputs = engine.generate([{"prompt_token_ids": ids} for ids, _ in batch], params, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            cached.append([output.num_cached_tokens or 0 for output in outputs])
        except VLLMValidationError as error:
            answers.append(str(error))
    sys.stdout.write(json.dumps([answers, cached]) + "\n")


if __name__ == "__main__":
    main()
