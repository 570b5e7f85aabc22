"""llm.c's train_gpt2 (github.com/karpathy/llm.c), built in a clone for the batch of the comparison: `--peer llmc=DIR`.

    sed -i 's/int B = 4;/int B = 2;/; s/int T = 64;/int T = 1024;/' train_gpt2.c && make train_gpt2

It is a program of its own, in float32 and for a CPU. It gets our weights and one batch as its files, is stopped
(SIGSTOP) after each of its steps, and goes on when it is its turn; the time is from there to the line that it prints.
Its step has AdamW and no clipping. It validates every ten steps, so a comparison ends before the tenth.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import weakref
from pathlib import Path

import torch

OVERRIDES = ["activation=gelu_tanh", "model.attention.bias=true", "model.mlp.bias=true"]
DEVICES = ("cpu",)
MOST_ROUNDS = 7  # and three steps before them
PER_LAYER = ["attention.pre.weight", "attention.pre.bias", "attention.core.qkv.weight", "attention.core.qkv.bias"]
PER_LAYER += ["attention.core.out.weight", "attention.core.out.bias", "mlp.pre.weight", "mlp.pre.bias"]
PER_LAYER += ["mlp.core.up.weight", "mlp.core.up.bias", "mlp.core.down.weight", "mlp.core.down.bias"]


class Program:
    """train_gpt2, stopped between its steps."""

    version = "clone"

    def __init__(self, program: Path, place: Path, threads: int):
        self.done = 0
        # A terminal, so that it writes line by line.
        ours, theirs = os.openpty()
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with open(theirs, "wb") as terminal:
            self.process = subprocess.Popen([program], cwd=place, stdout=terminal, stderr=terminal, env=variables)
        self.output = open(ours, errors="replace")
        weakref.finalize(self, _end, self.process, self.output)

    def line(self, wanted: str) -> re.Match:
        """Its next line with `wanted`."""
        said = []
        with contextlib.suppress(OSError):  # how a terminal says that its program has ended
            while text := self.output.readline():
                said.append(text.strip())
                if found := re.search(wanted, text):
                    return found
        raise ValueError(f"train_gpt2 ended: {' / '.join(said[-3:]) or 'it said nothing'}")

    def step(self) -> float:
        self.process.send_signal(signal.SIGCONT)
        loss = float(self.line(rf"^step {self.done}: train loss (\S+)")[1])
        self.process.send_signal(signal.SIGSTOP)
        self.done += 1
        return loss

    def most_held(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _end(process: subprocess.Popen, output) -> None:
    process.kill()
    process.wait()
    output.close()


def start(ours, config, given: str, tokens: torch.Tensor, batch: tuple[int, int], threads: int) -> Program:
    program = (Path(given).expanduser() / "train_gpt2").absolute()
    if not given or not program.is_file():
        raise ValueError("give the folder of a clone where train_gpt2 is built, as in --peer llmc=DIR")
    cfg = config.model
    if not cfg.tie_head or cfg.position["name"] != "learned" or cfg.norm["name"] != "layernorm":
        raise ValueError("it is a GPT-2: learned positions, layer norms and a tied head")
    if cfg.hidden != 4 * cfg.d_model or cfg.vocab_size > 2**16:
        raise ValueError("its MLP is 4 d_model wide and its tokens have two bytes")
    place = tempfile.TemporaryDirectory()
    _write_model(ours, cfg, Path(place.name) / "gpt2_124M.bin")
    folder = Path(place.name) / "dev" / "data" / "tinyshakespeare"
    folder.mkdir(parents=True)
    for part in ("train", "val"):
        _write(folder / f"tiny_shakespeare_{part}.bin", [20240520, 1, len(tokens)], [tokens.to(torch.uint16)])
    running = Program(program, Path(place.name), threads)
    running.place = place  # it reads its batch anew at each step
    found = running.line(r"^train dataset num_batches: (\d+)|Assertion .* >= .* B \* T")
    if found[1] != "1":
        raise ValueError(f"it is built for another batch: set B and T to {batch[0]} and {batch[1]} in train_gpt2.c")
    running.line(r"^val loss")  # of the first step; from here it trains
    running.process.send_signal(signal.SIGSTOP)
    return running


def _write_model(ours, cfg, file: Path) -> None:
    state = ours.state_dict()
    for i in range(cfg.n_layers):
        for kind in ("weight", "bias"):
            parts = [state[f"blocks.{i}.attention.core.{n}.{kind}"] for n in "qkv"]
            state[f"blocks.{i}.attention.core.qkv.{kind}"] = torch.cat(parts)
    rows = -(-cfg.vocab_size // 128) * 128
    embedding = state["token_embedding.weight"].new_zeros(rows, cfg.d_model)
    embedding[: cfg.vocab_size] = state["token_embedding.weight"]
    tensors = [embedding, state["position.table.weight"]]
    tensors += [state[f"blocks.{i}.{name}"] for name in PER_LAYER for i in range(cfg.n_layers)]
    tensors += [state["final_norm.weight"], state["final_norm.bias"]]
    sizes = [cfg.context_length, cfg.vocab_size, cfg.n_layers, cfg.n_heads, cfg.d_model, rows]
    _write(file, [20240326, 3, *sizes], tensors)


def _write(file: Path, header: list[int], tensors: list[torch.Tensor]) -> None:
    """Its files begin with 256 numbers of 4 bytes."""
    with open(file, "wb") as handle:
        handle.write(torch.tensor(header + [0] * (256 - len(header)), dtype=torch.int32).numpy().tobytes())
        for tensor in tensors:
            handle.write(tensor.detach().contiguous().numpy().tobytes())
