"""The CUDA kernels without a GPU, second way: nvcc's PTX, interpreted. Values, and each byte written once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import FAULTS, compile_kernels, formula, patched_sources
from ptx import Buffer, Machine, MemoryFault, parse

THREADS = 256
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
UNROLL = {"forward": 2, "backward": 1, "double_backward": 1}


@pytest.fixture(scope="module")
def ptx(nvcc, tmp_path_factory):
    made: dict = {}

    def get(fault: str | None = None):
        if fault not in made:
            folder = tmp_path_factory.mktemp("ptx")
            sources = patched_sources(folder / "csrc", fault)
            compile_kernels(nvcc, sources, folder / "kernels.ptx", "-ptx", "-arch=compute_80")
            made[fault] = parse((folder / "kernels.ptx").read_text())
        return made[fault]

    return get


def raw(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.uint8).numpy().copy().reshape(-1)


def elementwise(program, variant, op, inputs, error=0.0):
    """Run one elementwise kernel; the output as a tensor and the writes to each of its bytes."""
    x = inputs[-1]
    size, n = x.element_size(), x.numel()
    pack = 16 // size if variant == "vec" else 1
    buffers = [Buffer(np.full(n * size, 0xAB, np.uint8), 1 << 33)]
    buffers += [Buffer(raw(t), (2 + i) << 33) for i, t in enumerate(inputs)]
    bases = [b.base for b in buffers] + [0] * (4 - len(buffers))
    blocks = max(1, -(-max(1, n // pack) // (THREADS * UNROLL[op])))
    machine = Machine(program, [*bases, n], buffers, blocks, THREADS, error=error)
    machine.run()
    return torch.from_numpy(buffers[0].data.copy()).view(x.dtype), buffers[0].written, machine


def ulp_close(got, want, dtype):
    bound = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}[dtype]
    floor = {torch.bfloat16: 1e-36, torch.float16: 2.0**-24, torch.float32: 1e-9}[dtype]
    return ((got.double() - want).abs() <= bound * want.abs() + floor).all().item()


@pytest.mark.parametrize("op", ["forward", "backward", "double_backward"])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("variant", ["vec", "v1"])
def test_elementwise(ptx, name, op, variant):
    generator = torch.Generator().manual_seed(0)
    for n in (1, 7, 8, 9, 2048, 4099):
        inputs = [torch.randn(n, generator=generator).to(TYPES[name]) for _ in range(3)]
        inputs = inputs[: {"forward": 1, "backward": 2, "double_backward": 3}[op]]
        inputs[-1] *= 3
        y, written, machine = elementwise(ptx()[f"gelu_{op}_{name}_{variant}"], variant, op, inputs)
        assert (written == 1).all(), f"{(written != 1).sum()} bytes are not written exactly once"
        want = formula(inputs[-1])[["forward", "backward", "double_backward"].index(op)]
        for factor in inputs[:-1]:
            want = want * factor.double()
        # Beside zeros of the derivatives there is cancellation.
        loose = {"forward": 0.0, "backward": 1e-6, "double_backward": 2.0**-6}[op]
        assert ulp_close(y, want, TYPES[name]) or torch.allclose(y.double(), want, rtol=loose, atol=loose)
    if variant == "vec":
        assert machine.executed.get(f"ld.global.v4.{'f32' if name == 'f32' else 'u32'}")


@pytest.mark.parametrize("error", [-1.0, 0.0, 1.0])
def test_every_finite_bf16_and_f16_within_the_error_of_the_instructions(ptx, error):
    """At both ends of the error bounds of ex2.approx and rcp.approx the count stays far below ATen's 155 and 269."""
    for name in ("bf16", "f16"):
        x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(TYPES[name])
        x = x[x.isfinite()]
        one = torch.ones_like(x)
        y, dy, _ = (t.to(x.dtype) for t in formula(x))
        got, _, _ = elementwise(ptx()[f"gelu_forward_{name}_vec"], "vec", "forward", [x], error)
        bad = ~(got == y)
        assert bad.sum() <= 40, bad.sum()
        got, _, _ = elementwise(ptx()[f"gelu_backward_{name}_vec"], "vec", "backward", [one, x], error)
        bad = ~(got == dy)
        assert bad.sum() <= 60, bad.sum()  # ATen: thousands and 435


def test_special_values(ptx):
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 3e38, -3e38, 0.0, 1.0]).bfloat16()
    y, _, _ = elementwise(ptx()["gelu_forward_bf16_vec"], "vec", "forward", [x])
    assert y.isnan().tolist() == [False, True, True] + [False] * 5
    assert y[0] == float("inf") and y[3].signbit() and y[4] == x[4] and y[5] == 0
    dy, _, _ = elementwise(ptx()["gelu_backward_bf16_vec"], "vec", "backward", [torch.ones_like(x), x])
    assert dy.isnan().tolist() == [False, False, True] + [False] * 5
    assert dy[[0, 1, 3, 4, 5, 6]].tolist() == [1, 0, 0.5, 1, 0, 0.5]


def tiling(rows, columns, pack):
    """The launch arithmetic of gelu_kernels.h: tiles of 32 packs, runs of rows in whole eights, about 2048 blocks."""
    tiles = -(-columns // (32 * pack))
    share = -(-rows // max(1, 2048 // tiles))
    per_block = max(16, -(-share // 8) * 8)
    return tiles, per_block, -(-rows // per_block)


@pytest.mark.parametrize("rows, columns, variant", [(40, 24, "vec"), (5, 296, "vec"), (19, 37, "v1"), (1, 1, "v1")])
@pytest.mark.parametrize("bias_name", ["bf16", "f32"])
def test_bias(ptx, rows, columns, variant, bias_name):
    pack = 8 if variant == "vec" else 1
    tiles, per_block, chunks = tiling(rows, columns, pack)
    layout = tiles.to_bytes(8, "little") + per_block.to_bytes(8, "little") + chunks.to_bytes(8, "little")
    x, g = torch.randn(rows, columns).bfloat16(), torch.randn(rows, columns).bfloat16()
    b = torch.randn(columns).to(TYPES[bias_name])
    y, dy, _ = formula(x.double() + b.double())

    out = Buffer(np.full(x.nbytes, 0xAB, np.uint8), 1 << 33)
    read = [Buffer(raw(t), (2 + i) << 33) for i, t in enumerate((g, x, b))]
    params = [out.base, read[1].base, read[2].base, rows, columns, layout]
    program = ptx()[f"gelu_bias_forward_bf16_{bias_name}_{variant}"]
    Machine(program, params, [out, *read], tiles * chunks, THREADS).run()
    assert (out.written == 1).all()
    assert ulp_close(torch.from_numpy(out.data).view(torch.bfloat16).view(rows, columns), y, torch.bfloat16)

    dx = Buffer(np.full(x.nbytes, 0xAB, np.uint8), 1 << 33)
    partial = Buffer(np.full(chunks * columns * 4, 0xAB, np.uint8), 9 << 33)
    params = [dx.base, *(r.base for r in read), partial.base, rows, columns, layout]
    program = ptx()[f"gelu_bias_backward_bf16_{bias_name}_{variant}"]
    Machine(program, params, [dx, partial, *read], tiles * chunks, THREADS).run()
    assert (dx.written == 1).all() and (partial.written == 1).all()
    want = g.double() * dy
    got = torch.from_numpy(dx.data).view(torch.bfloat16).view(rows, columns).double()
    assert torch.allclose(got, want, rtol=2.0**-7, atol=1e-6)

    db = Buffer(np.full(b.nbytes, 0xAB, np.uint8), 10 << 33)
    params = [db.base, partial.base, chunks, columns]
    Machine(ptx()[f"gelu_reduce_{bias_name}"], params, [db, partial], -(-columns // 32), THREADS).run()
    assert (db.written == 1).all()
    total = torch.from_numpy(db.data).view(TYPES[bias_name])
    close = 2.0**-8 if bias_name == "bf16" else 1e-5
    assert torch.allclose(total.double(), want.sum(0), rtol=close, atol=close * 4)


def test_blocks_beyond_two_to_the_31_elements(ptx):
    """Index arithmetic: the last block of 2^33 + 5 elements reads and writes where it should."""
    n = 2**33 + 4096
    first = n * 2 - 4096 * 2
    x = torch.randn(4096).bfloat16()
    out, read = Buffer(np.zeros(8192, np.uint8), (1 << 40) + first), Buffer(raw(x), (1 << 41) + first)
    program = ptx()["gelu_forward_bf16_vec"]
    block = n // 8 // 512 - 1
    Machine(program, [1 << 40, 1 << 41, 0, 0, n], [out, read], 1, THREADS, first_block=block).run()
    assert (out.written == 1).all()
    assert ulp_close(torch.from_numpy(out.data).view(torch.bfloat16), formula(x)[0], torch.bfloat16)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(ptx, fault):
    x = torch.linspace(-4, 4, 4099).bfloat16()
    with pytest.raises((MemoryFault, AssertionError)):
        y, written, _ = elementwise(ptx(fault)["gelu_forward_bf16_vec"], "vec", "forward", [x])
        assert (written == 1).all()
        assert (y != formula(x)[0].bfloat16()).sum() <= 8  # 0.0447 for 0.044715 moves more
