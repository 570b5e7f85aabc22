"""Keeps what a training step frees in the process, so that the next step need not ask the kernel for it again.

glibc's malloc gives large blocks back to the kernel as soon as they are freed, and gets them back page by page, each
page a fault and 4 KiB of zeros: on a CPU a tenth of a large model's step (docs/performance.md has the numbers). Two
of its settings end that. They act at once, so no variable has to be set before Python starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from gptframe.errors import UserError

# From malloc.h. M_MMAP_MAX=0 keeps large blocks in the heap, M_TRIM_THRESHOLD=-1 the heap in the process.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
# What malloc itself comes to as blocks are freed, unless it is told otherwise: it cannot be told to find out again.
USUAL = {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 32 * 2**20, M_TRIM_THRESHOLD: 64 * 2**20}


@contextlib.contextmanager
def reused_memory(wanted: bool | str, accelerator: str) -> Iterator[bool]:
    """Let freed memory stay with the process for a while, then give it back.

    Args:
        wanted: `trainer.reuse_memory`: true, false, or auto, which is true for CPU runs where malloc is glibc's and
            the environment says nothing about it.

    Yields:
        Whether it is so.

    Raises:
        UserError: it is wanted and cannot be.
    """
    reason = _obstacle(accelerator)
    if reason is not None and wanted is True:
        raise UserError(f"trainer.reuse_memory=true: {reason}. Use trainer.reuse_memory=auto")
    if wanted is False or reason is not None or (wanted == "auto" and _set_outside()):
        yield False
        return
    libc = ctypes.CDLL(None)
    done = all([libc.mallopt(M_MMAP_MAX, 0), libc.mallopt(M_TRIM_THRESHOLD, -1)])
    try:
        yield done
    finally:
        for setting, value in USUAL.items():
            libc.mallopt(setting, value)
        libc.malloc_trim(0)


def _obstacle(accelerator: str) -> str | None:
    """Why there is nothing to keep here; None where there is."""
    if accelerator != "cpu":
        return f"PyTorch keeps freed memory on {accelerator} as it is"
    try:
        glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # Windows, macOS, musl
        glibc = False
    return None if glibc else "only glibc's malloc has the settings that it needs, and this is another"


def _set_outside() -> bool:
    """Whether whoever started the process has set malloc up already."""
    variables = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    return any(v in os.environ for v in variables) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
