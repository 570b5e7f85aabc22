"""What this machine has: memory, disk, threads, versions."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def available_memory() -> int | None:
    """Bytes that a new process may use without swapping: what the kernel says is available, or less where a control
    group sets a limit; None where neither can be read."""
    found = [size for size in (_meminfo(), _cgroup()) if size is not None]
    return min(found) if found else None


def _meminfo() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroup() -> int | None:
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = int((root / limit).read_text())
            if most < 1 << 60:
                return max(0, most - int((root / used).read_text()))
        except (OSError, ValueError):
            continue
    return None


def free_disk(path: Path) -> int | None:
    """Bytes free where `path` is or would be made; None where that cannot be told."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def cpu_count() -> int:
    """CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def versions(*packages: str) -> dict[str, str]:
    """The installed version of each package, or "missing"."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found
