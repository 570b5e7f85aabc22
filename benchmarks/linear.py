"""The gradient of a linear layer's weight in bfloat16: the linear backend amx against torch, in turns in one process.

    python benchmarks/linear.py                 # the layers of andrea120m, one thread, processor time
    python benchmarks/linear.py --threads 2     # on a quiet machine

A layer of 4096 x 768 x 3072 has 4096 rows and goes from 768 to 3072. torch's own forward pass and gradient of the input
stand beside it: what its products can do where nothing has to be turned. Both gradients must agree before anything is
timed.
"""

from __future__ import annotations

import argparse

import torch
from gptframe_gelu_cuda import backend, product
from timing import interleave, load, ratio

LAYERS = ["4096x768x768", "4096x768x3072", "4096x3072x768", "496x768x8449"]
TOLERANCE = 1e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", action="append", metavar="ROWSxINxOUT")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    processor = a.threads == 1
    try:
        origin = backend.require_product()
    except backend.BackendError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{load()}, torch {torch.__version__}, {origin}")
    print(f"threads {a.threads}, {'processor' if processor else 'wall'} time, {a.rounds} rounds; TFLOP/s of the median")
    print(f"{'layer':16} {'forward':>9} {'input':>7} {'weight':>7} {'amx':>7}   torch / amx, gradient of the weight")
    for text in a.layer or LAYERS:
        rows, n_in, n_out = map(int, text.split("x"))
        x, grad, weight = (torch.randn(*s).bfloat16() for s in ((rows, n_in), (rows, n_out), (n_out, n_in)))
        calls = {
            "forward": lambda x=x, w=weight: x @ w.T,
            "input": lambda g=grad, w=weight: g @ w,
            "weight": lambda g=grad, x=x: g.T @ x,
            "amx": lambda g=grad, x=x: product.weight_gradient(g, x),
        }
        ours, theirs = calls["amx"]()[0], calls["weight"]().float()
        if not float((ours - theirs).norm() / theirs.norm()) <= TOLERANCE:
            print(f"{text}: not timed, the gradients differ")
            continue
        times = interleave(calls, a.rounds, torch.device("cpu"))
        seconds = {name: t.processor if processor else t.seconds for name, t in times.items()}
        speed = [2 * rows * n_in * n_out / sorted(s)[len(s) // 2] / 1e12 for s in seconds.values()]
        low, middle, high = ratio(seconds["weight"], seconds["amx"])
        print(
            f"{text:16} {speed[0]:9.2f} {speed[1]:7.2f} {speed[2]:7.2f} {speed[3]:7.2f}   "
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
