"""One token through a float32 matrix [out, in]: as nn.Linear has it, with contiguous columns, and in parts.

    python benchmarks/layout.py
    python benchmarks/layout.py --tokens 8 --threads 2

Many matrices of each size take turns, more than the caches hold. "parts" is the batch of products that generation uses
for large models on AMD (gptframe.model.call.product). Ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.nn.functional as F
from timing import interleave, machine, ratio

from gptframe.model.call import product

SHAPES = [(384, 384), (1152, 384), (1536, 384), (384, 1536), (8192, 384), (768, 768), (3072, 768), (768, 3072)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    cpu = torch.device("cpu")
    print(f"{machine(cpu, [a.threads])}, {a.tokens} tokens")
    for n_out, n_in in SHAPES:
        count = max(2, 60_000_000 // (4 * n_out * n_in))
        rows = [torch.randn(n_out, n_in) for _ in range(count)]
        columns = [w.t().contiguous().t() for w in rows]
        x = torch.randn(1, a.tokens, n_in)
        rivals = {
            "rows": lambda x=x, ws=rows: [F.linear(x, w) for w in ws],
            "columns": lambda x=x, ws=columns: [F.linear(x, w) for w in ws],
            "parts": lambda x=x, ws=rows: [product(x, w, streamed=True) for w in ws],
        }
        with torch.inference_mode():
            times = interleave(rivals, a.rounds, cpu)
        microseconds = {name: statistics.median(t.processor) / count * 1e6 for name, t in times.items()}
        print(f"{n_out:>5} x {n_in:<5} rows {microseconds['rows']:7.0f} us", end="")
        for name in ("columns", "parts"):
            low, middle, high = ratio(times["rows"].processor, times[name].processor)
            print(
                f"   {name} {microseconds[name]:7.0f} us, {middle:.2f} times as fast ({low:.2f} to {high:.2f})", end=""
            )
        print()


if __name__ == "__main__":
    main()
