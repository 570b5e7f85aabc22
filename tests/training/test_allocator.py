"""Memory that a step has freed stays with the process, and is given back afterwards."""

import os
import sys

import pytest
import torch

from gptframe.config import TrainerConfig
from gptframe.errors import UserError
from gptframe.training import allocator
from gptframe.training.allocator import reused_memory

SIZE = 12 * 2**20  # floats: 48 MiB, more than malloc would ever keep by itself
glibc = pytest.mark.skipif(allocator._obstacle("cpu") is not None, reason="malloc is not glibc's")


def faults() -> int:
    """Pages that a large tensor has to get from the system."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(SIZE)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@glibc
def test_freed_memory_is_kept_and_then_given_back(monkeypatch):
    for variable in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(variable, raising=False)
    with reused_memory("auto", "cpu") as kept:
        assert kept
        # The first few leave splinters between them, which malloc's cache for small blocks holds until it is full.
        assert min(faults() for _ in range(20)) < 20
        held = resident()
    assert resident() < held - SIZE * 3


@glibc
@pytest.mark.parametrize("variable", ["GLIBC_TUNABLES=glibc.malloc.hugetlb=1", "MALLOC_MMAP_THRESHOLD_=65536"])
def test_auto_leaves_alone_what_the_environment_sets(monkeypatch, variable):
    monkeypatch.setenv(*variable.split("=", 1))
    with reused_memory("auto", "cpu") as kept:
        assert not kept
    with reused_memory(True, "cpu") as kept:
        assert kept


@pytest.mark.parametrize("system", ["musl", "macos", "windows"])
def test_without_glibc_nothing_is_touched(monkeypatch, system):
    def confstr(name):
        if system == "musl":
            return ""
        raise ValueError("unrecognized configuration name")

    if system == "windows":
        monkeypatch.delattr(os, "confstr", raising=False)
    else:
        monkeypatch.setattr(os, "confstr", confstr, raising=False)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: sys.exit("it was opened"))
    with reused_memory("auto", "cpu") as kept:
        assert not kept
    with pytest.raises(UserError, match="trainer.reuse_memory=true: only glibc's malloc"), reused_memory(True, "cpu"):
        pass


def test_false_auto_on_a_gpu_and_wrong_values():
    for wanted, accelerator in ((False, "cpu"), ("auto", "gpu")):
        with reused_memory(wanted, accelerator) as kept:
            assert not kept
    with pytest.raises(UserError, match="keeps freed memory on gpu as it is"), reused_memory(True, "gpu"):
        pass
    with pytest.raises(UserError, match="trainer.reuse_memory='on' must be true, false or auto"):
        TrainerConfig(reuse_memory="on")
