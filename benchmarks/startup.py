"""Start-up: from command to first optimiser step against `import pytorch_lightning`, and what must need no torch.

    python benchmarks/startup.py                       # 7 rounds, some three minutes
    python benchmarks/startup.py --rounds 15 --json startup.json
    python benchmarks/startup.py --check               # exit status 1 where a bar is missed

Every start is a process of its own, and the rivals take turns. A run is stopped as soon as its first step is shown,
which it is after its row is in metrics.csv. The ratio is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import load, ratio, ratio_words

ROOT = Path(__file__).resolve().parent.parent
TRAIN = [sys.executable, str(ROOT / "train.py")]
GPTFRAME = [sys.executable, "-c", "import sys; from gptframe.cli import main; sys.exit(main())"]
LIGHTNING = [sys.executable, "-c", "import pytorch_lightning"]
STEP_BAR, QUICK_BAR = 1.25, 1.0  # times the import, seconds
QUICK = {
    "train --help": [*TRAIN, "--help"],
    "train --cfg job": [*TRAIN, "--cfg", "job"],
    "plugins list": [*GPTFRAME, "plugins", "list"],
    "an unknown option": [*TRAIN, "norm=layernrom"],
    "an unknown key": [*TRAIN, "model.d_modell=64"],
    "a wrong value": [*TRAIN, "model.n_heads=5"],
}
HEAVY = ("torch", "pytorch_lightning", "transformers", "matplotlib")


def clock(command: list[str], folder: str, until: bytes | None = None) -> tuple[float, float]:
    """Seconds, on the wall and of the processor, until the process ends or prints a line that begins with `until`."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    )
    assert process.stdout is not None
    seen = any(until is not None and line.startswith(until) for line in iter(process.stdout.readline, b""))
    if seen:
        process.kill()
    _, _, usage = os.wait4(process.pid, 0)
    elapsed = time.perf_counter() - began
    process.returncode = 0
    process.stdout.close()
    if until is not None and not seen:
        raise SystemExit(f"error: {' '.join(command)} ended before its first step")
    return elapsed, usage.ru_utime + usage.ru_stime


def heavy_imports(command: list[str], folder: str) -> list[str]:
    """Which of the large packages a command imports."""
    command = [command[0], "-X", "importtime", *command[1:]]
    log = subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr
    names = {line.rsplit("|", 1)[1].strip() for line in log.splitlines() if line.startswith("import time:")}
    return [name for name in HEAVY if name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    arguments = parser.parse_args()
    first_step = [*TRAIN, "callbacks.progress=lines"]
    words = load()
    print(words, flush=True)
    reached = True
    with tempfile.TemporaryDirectory() as folder:
        rivals: dict[str, tuple[list[str], bytes | None]] = {
            "import": (LIGHTNING, None),
            "step": (first_step, b"step "),
            **{name: (command, None) for name, command in QUICK.items()},
        }
        for command, until in rivals.values():  # fills the page cache, the byte code and the token cache
            clock(command, folder, until)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
        for number in range(arguments.rounds):
            names = list(rivals)
            for name in names if number % 2 else names[::-1]:
                times[name].append(clock(rivals[name][0], folder, rivals[name][1]))
        results: dict[str, Any] = {"machine": words, "rounds": arguments.rounds, "seconds": times}
        for which, place in (("wall", 0), ("processor", 1)):
            step, plain = ([pair[place] for pair in times[name]] for name in ("step", "import"))
            found = ratio(step, plain)
            results[which] = found
            print(
                f"first step {statistics.median(step):.2f} s, import pytorch_lightning "
                f"{statistics.median(plain):.2f} s ({which}): ratio {ratio_words(found)}"
            )
        reached &= results["wall"][1] <= STEP_BAR
        results["imports"] = {}
        for name, command in QUICK.items():
            middle, used = (statistics.median(column) for column in zip(*times[name], strict=True))
            heavy = heavy_imports(command, folder)
            results["imports"][name] = heavy
            print(f"{name:20s} {middle:.2f} s (processor {used:.2f} s), imports {', '.join(heavy) or 'nothing large'}")
            reached &= middle < QUICK_BAR and not heavy
    print(f"bars (first step at most {STEP_BAR}x, the rest under {QUICK_BAR:.0f} s without torch): "
          f"{'reached' if reached else 'MISSED'}; {load()}")  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return int(arguments.check and not reached)


if __name__ == "__main__":
    sys.exit(main())
