"""Words spoken by espeak-ng, a speech synthesiser that systems bring as a package."""

from __future__ import annotations

import io
import shutil
import subprocess
from collections.abc import Sequence

import numpy as np

from acm_compiler.data.audio import read_clip
from acm_compiler.errors import DataError, PackageMissing

PROGRAM = "espeak-ng"
_PAUSE_MS = 500
_QUIET = 0.005  # of full scale; what a synthesiser leaves between words is silence
_GAP = 0.25  # seconds of quiet that no word holds


def synthesiser_present() -> bool:
    """Whether espeak-ng can be run here."""
    return shutil.which(PROGRAM) is not None


def speak_words(words: Sequence[str], *, voice: str, speed: int, pitch: int, rate: int) -> list[np.ndarray]:
    """Each word alone, float32 [samples] at `rate` per second, from its first sound to its last.

    voice: espeak-ng's name, such as `en-us+f2`; speed: words per minute; pitch: 0 to 99.
    PackageMissing without espeak-ng, DataError where it does not say these words.
    """
    text = "".join(f'{word}.<break time="{_PAUSE_MS}ms"/>' for word in words)
    command = [PROGRAM, "-m", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", f"<speak>{text}</speak>"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    except FileNotFoundError as error:
        raise PackageMissing(
            "espeak-ng speaks these words, and it is not installed",
            fix="install the system's package: apt-get install espeak-ng (or brew install espeak-ng)",
        ) from error
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (error.stderr or b"").decode(errors="replace").strip()
        raise DataError("espeak-ng failed", where=f"voice {voice}", found=said or str(error)) from error
    parts = _cut(read_clip(io.BytesIO(done.stdout), rate=rate, name=f"voice {voice}"), rate)
    if len(parts) != len(words):
        raise DataError(
            "espeak-ng did not keep words apart", where=f"voice {voice}", found=len(parts), expected=len(words)
        )
    return parts


def _cut(samples: np.ndarray, rate: int) -> list[np.ndarray]:
    """The parts between long quiet stretches."""
    loud = np.flatnonzero(np.abs(samples) > _QUIET)
    if not len(loud):
        return []
    gaps = np.flatnonzero(np.diff(loud) > _GAP * rate)
    starts, ends = np.r_[loud[0], loud[gaps + 1]], np.r_[loud[gaps], loud[-1]] + 1
    return [samples[start:end] for start, end in zip(starts, ends, strict=True)]
