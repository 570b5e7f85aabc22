"""One token through a float32 matrix [out, in]: rows contiguous (as nn.Linear has it) against columns contiguous.

    python benchmarks/layout.py
    python benchmarks/layout.py --tokens 8 --threads 2

Many matrices of each size take turns, more than the caches hold. The ratio, rows to columns, is the median over rounds.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.nn.functional as F
from timing import interleave, machine, ratio

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
        }
        with torch.inference_mode():
            times = interleave(rivals, a.rounds, cpu)
        microseconds = {name: statistics.median(t.processor) / count * 1e6 for name, t in times.items()}
        low, middle, high = ratio(times["rows"].processor, times["columns"].processor)
        print(
            f"{n_out:>5} x {n_in:<5} rows {microseconds['rows']:7.0f} us  columns {microseconds['columns']:7.0f} us  "
            f"ratio {middle:.2f} ({low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main()
