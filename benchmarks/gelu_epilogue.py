"""Decides whether the MLP through cuBLASLt's GELU epilogues pays on this GPU, and records the verdict.

    python benchmarks/gelu_epilogue.py

Forward and backward of one MLP, interleaved: ATen, compiled GELU with separate kernels, and the epilogue. The verdict
is "faster" where the results agree and the epilogue beats separate kernels by 1 % or more at both shapes, the lower
quartile included. `activation.epilogue=true` is refused without that verdict. Exit status: 0 faster, 1 not, 2 not
possible here.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from gptframe_gelu_cuda import backend, epilogue, ops
from timing import interleave, machine, ratio

SHAPES = {"andrea120m": (16384, 768, 3072), "andrea480m": (16384, 1536, 6144)}  # tokens, d_model, hidden
MARGIN = 1.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--dry-run", action="store_true", help="measure, but record nothing")
    args = parser.parse_args()
    try:
        backend.require("cuda")
        epilogue.load()
    except backend.BackendError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    print(machine(device, []))
    faster, words = True, []
    for name, (rows, width, hidden) in SHAPES.items():
        torch.manual_seed(0)

        def tensor(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, device=device) * scale).bfloat16().requires_grad_()

        x, w1, b1 = tensor(rows, width), tensor(hidden, width, scale=width**-0.5), tensor(hidden)
        w2, b2 = tensor(width, hidden, scale=hidden**-0.5), tensor(width)
        leaves, grad = (x, w1, b1, w2, b2), torch.randn(rows, width, device=device).bfloat16()
        reason = epilogue.unfit(x, w1, b1, w2)
        if reason:
            print(f"error: {reason}", file=sys.stderr)
            return 2

        def aten(x, w1, b1, w2, b2):
            return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)

        def separate(x, w1, b1, w2, b2):
            return F.linear(ops.bias_gelu(F.linear(x, w1), b1), w2, b2)

        rivals = {"aten": aten, "separate": separate, "epilogue": epilogue.mlp}

        def run(f, leaves=leaves, grad=grad):
            y = f(*leaves)
            return (y, *torch.autograd.grad(y, leaves, grad))

        wide = [t.detach().double().requires_grad_() for t in leaves]
        want = run(aten, wide, grad.double())
        errors = {
            kind: max(((g.double() - w).norm() / w.norm()).item() for g, w in zip(run(f), want, strict=True))
            for kind, f in rivals.items()
        }
        times = interleave({kind: lambda f=f: run(f) for kind, f in rivals.items()}, args.rounds, device)
        low, middle, high = ratio(times["separate"].seconds, times["epilogue"].seconds)
        agrees = errors["epilogue"] <= 1.5 * max(errors["aten"], errors["separate"])
        faster &= agrees and low > 1 and middle >= MARGIN
        for kind in rivals:
            print(f"{name:11s} {kind:9s} {times[kind].median * 1e3:8.3f} ms, largest relative error {errors[kind]:.2e}")
        words.append(f"{name} separate/epilogue {middle:.3f} [{low:.3f}, {high:.3f}]" + ("" if agrees else ", WRONG"))
        print(words[-1])
    verdict = "faster: activation.epilogue=true is allowed here" if faster else "not faster: leave it off"
    print(verdict)
    if not args.dry_run:
        print(f"recorded in {epilogue.record(faster, '; '.join(words))}")
    return int(not faster)


if __name__ == "__main__":
    sys.exit(main())
