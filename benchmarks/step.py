"""A training step of gptframe against other people's code: same weights, batch, precision, threads and optimiser.

    python benchmarks/step.py --peer transformers
    python benchmarks/step.py --peer nanogpt=DIR --peer x_transformers --model andrea120m --batch 4x1024 --rounds 7
    python benchmarks/step.py --peer nanogpt=DIR --compile theirs --ours activation=gelu_cuda --json s.json --png s.png

A step is forward, backward, clipping to norm 1 and AdamW. Both sides begin from the same weights; before anything is
timed their losses must agree. Rounds alternate (A B, B A, ...); the ratio is the median, with quartiles, of the ratios
within a round, so that other load on the machine is shared. Memory is the peak of a process of its own for each side.
A new peer is a file in benchmarks/peers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from peers import Process
from timing import interleave, machine, ratio

from gptframe.training.allocator import reused_memory

sys.path.insert(0, str(Path(__file__).parent))
LOSS_TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}


class Side:
    """One rival: a step that returns the loss."""

    def __init__(self, loss: Callable[[], torch.Tensor], parameters, optimizer, autocast):
        self.loss, self.parameters, self.optimizer, self.autocast = loss, list(parameters), optimizer, autocast

    def step(self) -> float:
        with self.autocast():
            loss = self.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def most_held(self) -> int:
        """The most memory that this side has held, in bytes."""
        return torch.cuda.max_memory_allocated() if self.parameters[0].is_cuda else most_held()


def build_pair(name: str, given: str, a) -> tuple[Side, Side | Process, str, int]:
    """(ours, theirs, version of theirs, our parameters), for one peer."""
    from gptframe import plugins
    from gptframe.compose import compose_config
    from gptframe.config import Config
    from gptframe.model import build_model
    from gptframe.registry import build
    from gptframe.training.optimizer import param_groups

    plugins.load_entry_points()
    peer_module = importlib.import_module(f"peers.{name}")
    devices = getattr(peer_module, "DEVICES", (a.device,))
    if torch.device(a.device).type not in devices:
        raise ValueError(f"it runs on {' and '.join(devices)} alone, and this is {a.device}")
    base = [f"model={a.model}", *a.size, *peer_module.OVERRIDES]
    plain = Config.from_dict(compose_config(base))
    ours = build_model(plain.model, seed=1)
    batch, length = map(int, a.batch.split("x"))
    tokens = torch.randint(0, plain.model.vocab_size, (batch * length + 1,), generator=torch.Generator().manual_seed(0))
    program = hasattr(peer_module, "start")
    if a.rounds > getattr(peer_module, "MOST_ROUNDS", a.rounds):
        raise ValueError(f"it does other things after {peer_module.MOST_ROUNDS} rounds, and this is {a.rounds}")
    if program:
        peer = peer_module.start(ours, plain, given, tokens, (batch, length), a.threads)
    else:
        peer = peer_module.load(ours, plain, given)
    if a.ours:
        state = ours.state_dict()
        ours = build_model(Config.from_dict(compose_config([*base, *a.ours])).model, seed=1)
        ours.load_state_dict(state)
    device = torch.device(a.device)
    ours = ours.to(device)
    ids, targets = (part.view(batch, length).clone().to(device) for part in (tokens[:-1], tokens[1:]))
    if not program:
        targets[:, -1] = -100  # which transformers does not have
    count = int((targets != -100).sum())
    forward = torch.compile(ours.forward) if a.compile in ("both", "ours") else ours.forward

    def autocast():
        return torch.autocast(device.type, torch.bfloat16) if a.precision == "bf16" else contextlib.nullcontext()

    section = {"name": "adamw", "lr": 1e-4, "weight_decay": 0.1}
    left = Side(
        lambda: forward(ids, None, targets) / count,
        ours.parameters(),
        build("optimizer", section, param_groups(ours)),
        autocast,
    )
    parameters = sum(p.numel() for p in ours.parameters())
    if program:
        if a.precision != "fp32":
            raise ValueError("it computes in float32")
        return left, peer, peer.version, parameters
    theirs = peer.model.to(device)
    model = torch.compile(theirs) if a.compile in ("both", "theirs") else theirs
    theirs_adamw = torch.optim.AdamW(list(peer.groups), lr=1e-4, betas=(0.9, 0.95), fused=True)
    right = Side(lambda: peer.loss(model, ids, targets), theirs.parameters(), theirs_adamw, autocast)
    return left, right, peer.version, parameters


def alone(name: str, given: str, which: str, a) -> None:
    """One side, in a process of its own: what it is, and then a step for each line that comes in."""
    try:
        ours, theirs, version, parameters = build_pair(name, given, a)
    except (ValueError, ImportError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    side = ours if which == "ours" else theirs
    del ours, theirs
    print(json.dumps({"version": version, "parameters": parameters}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"loss": side.step(), "bytes": side.most_held()}), flush=True)


class Apart:
    """One side in a process of its own, which waits while the other one works."""

    def __init__(self, name: str, given: str, which: str):
        command = [sys.executable, __file__, *sys.argv[1:], "--alone", f"{name}={given}", which]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.bytes = 0
        self.about = self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        found = json.loads(line) if line else {"error": "its process ended"}
        if "error" in found:
            raise ValueError(found["error"])
        return found

    def step(self) -> float:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        done = self._answer()
        self.bytes = done["bytes"]
        return done["loss"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def most_held() -> int:
    """The most memory that this process has held, in bytes."""
    try:  # getrusage would count the process that started this one, up to the moment when it did
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory(name: str, given: str) -> dict[str, float]:
    found = {}
    for which in ("ours", "theirs"):
        side = Apart(name, given, which)
        for _ in range(3):
            side.step()
        side.close()
        found[which] = side.bytes / 2**30
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[=DIR]",
        help="transformers, litgpt, x_transformers, nanogpt=DIR, llmc=DIR, modded_nanogpt=DIR",
    )
    parser.add_argument("--model", default="andrea12m")
    parser.add_argument("--size", action="append", default=[], metavar="KEY=VALUE", help="overrides of both sides")
    parser.add_argument("--ours", action="append", default=[], metavar="KEY=VALUE", help="overrides of our side alone")
    parser.add_argument("--batch", default="2x1024", metavar="BxT")
    parser.add_argument("--precision", choices=LOSS_TOLERANCE, default="fp32")
    parser.add_argument("--compile", choices=("both", "ours", "theirs", "none"), default="none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--apart", action="store_true", help="each side in a process of its own, with its memory")
    parser.add_argument(
        "--reuse-memory",
        nargs="?",
        const="both",
        choices=("both", "ours"),
        help="malloc as trainer.reuse_memory sets it, for both sides, or with --apart for ours",
    )
    parser.add_argument(
        "--memory", action="store_true", help="also measure the peak of each side in a process of its own"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--png", metavar="FILE")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.reuse_memory == "ours" and not a.apart:
        parser.error("--reuse-memory ours needs --apart: malloc is set up for a whole process")
    torch.set_num_threads(a.threads)
    side = a.alone[1] if a.alone else "both"
    wanted = a.reuse_memory == "both" or (a.reuse_memory == "ours" and side == "ours")
    with reused_memory(wanted, torch.device(a.device).type):
        compare(a)


def compare(a) -> None:
    if a.alone:
        alone(*a.alone[0].split("=", 1), a.alone[1], a)
        return
    batch, length = map(int, a.batch.split("x"))
    load = os.getloadavg()[0]
    where = machine(torch.device(a.device), [a.threads])
    print(f"{where}, {platform.system()}, load {load:.1f} before the start")
    print(
        f"{a.model} {' '.join(a.size)}, batch {a.batch}, {a.precision}, compiled: {a.compile}, {a.rounds} rounds"
        + (f", memory reused: {a.reuse_memory}" if a.reuse_memory else "")
    )
    print(f"{'peer':<24} {'gptframe':>9} {'peer':>9} tokens/s  {'ratio':<20} {'losses':<20} memory")
    rows = []
    for text in a.peer or ["transformers"]:
        name, _, given = text.partition("=")
        try:
            if a.apart:
                ours, theirs = Apart(name, given, "ours"), Apart(name, given, "theirs")
                version, parameters = ours.about["version"], ours.about["parameters"]
            else:
                ours, theirs, version, parameters = build_pair(name, given, a)
        except (ValueError, ImportError) as error:
            print(f"{name:<24} not compared: {error}")
            continue
        first = (ours.step(), theirs.step())
        agree = abs(first[0] - first[1]) <= LOSS_TOLERANCE[a.precision] * max(1.0, abs(first[1]))
        if not agree:
            print(f"{name:<24} not timed: the losses are {first[0]:.6f} and {first[1]:.6f}")
            continue
        times = interleave({"ours": ours.step, "theirs": theirs.step}, a.rounds, torch.device(a.device))
        low, middle, high = ratio(times["theirs"].seconds, times["ours"].seconds)
        row = {
            "peer": name, "version": version, "parameters": parameters, "losses": first,
            "tokens_per_second": {k: batch * length / t.median for k, t in times.items()},
            "seconds": {k: t.seconds for k, t in times.items()},
            "ratio": {"lower": low, "median": middle, "upper": high},
        }  # fmt: skip
        if a.apart:
            ours.close()
            theirs.close()
            row["memory_gib"] = {"ours": ours.bytes / 2**30, "theirs": theirs.bytes / 2**30}
        del ours, theirs
        if a.memory and not a.apart:
            row["memory_gib"] = memory(name, given)
        rows.append(row)
        speed, held = row["tokens_per_second"], row.get("memory_gib")
        print(
            f"{f'{name} {version}':<24} {speed['ours']:9.0f} {speed['theirs']:9.0f}           "
            f"{f'{middle:.2f} ({low:.2f} to {high:.2f})':<20} {f'{first[0]:.5f} {first[1]:.5f}':<20} "
            + (f"{held['ours']:.2f} and {held['theirs']:.2f} GiB" if held else "")
        )
    report = {"machine": where, "load": [load, os.getloadavg()[0]], "arguments": vars(a), "rows": rows}
    if a.json:
        Path(a.json).write_text(json.dumps(report, indent=1), encoding="utf-8")
    if a.png and rows:
        draw(report, a.png)


def draw(report: dict, path: str) -> None:
    """Ratios as bars with their quartiles; 1 is the same speed."""
    from matplotlib.figure import Figure

    rows = report["rows"]
    figure = Figure(figsize=(6.4, 1.4 + 0.5 * len(rows)), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    middle = [row["ratio"]["median"] for row in rows]
    spread = [[m - row["ratio"]["lower"] for m, row in zip(middle, rows, strict=True)],
              [row["ratio"]["upper"] - m for m, row in zip(middle, rows, strict=True)]]  # fmt: skip
    axes.barh([f"{row['peer']} {row['version']}" for row in rows], middle, xerr=spread, color="#2a5c9e", height=0.6)
    axes.axvline(1.0, color="#555555", linestyle="--", linewidth=1)
    arguments = report["arguments"]
    axes.set(
        xlabel="times the tokens per second of the peer",
        title=f"{arguments['model']}, {arguments['batch']}, {arguments['precision']}\n{report['machine']}",
    )
    axes.title.set_fontsize(8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    figure.savefig(path)


if __name__ == "__main__":
    main()
