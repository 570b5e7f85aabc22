"""The CUDA kernels without a GPU, third way: the machine code. Width of accesses, registers, spills, constants."""

from __future__ import annotations

import re
import struct
import subprocess

import pytest
from conftest import compile_kernels, patched_sources

ARCHS = ("sm_80", "sm_90", "sm_100")


def read(cuobjdump, cubin) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Kernel -> its instructions, and kernel -> registers."""
    code: dict[str, list[str]] = {}
    text = subprocess.run([*cuobjdump, "-sass", str(cubin)], check=True, capture_output=True, text=True).stdout
    for line in text.splitlines():
        if found := re.search(r"Function : (\w+)", line):
            kernel = code.setdefault(found[1], [])
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            kernel.append(found[1])
    usage = subprocess.run([*cuobjdump, "-res-usage", str(cubin)], check=True, capture_output=True, text=True)
    registers = re.findall(r"Function (\w+):\s*REG:(\d+)", usage.stdout + usage.stderr)
    return code, {name: int(count) for name, count in registers}


def problems(code, registers) -> list[str]:
    found = []
    for name, lines in code.items():
        if any(re.search(r"\b(LDL|STL)\b", line) for line in lines):
            found.append(f"{name} spills")
        # Eight blocks of 256 threads share 65536 registers: full occupancy at 32.
        limit = 32 if re.match(r"gelu_(forward|backward)_", name) else 64
        if registers[name] > limit:
            found.append(f"{name} uses {registers[name]} registers")
        if name.endswith("_vec"):
            op = re.match(r"gelu_(bias_forward|bias_backward|double_backward|forward|backward)", name)[1]
            loads = {"forward": 2, "backward": 2, "double_backward": 3, "bias_forward": 2, "bias_backward": 3}[op]
            stores = 2 if op == "forward" else 1
            if sum("LDG.E.128" in line for line in lines) < loads:
                found.append(f"{name} lacks 128-bit loads")
            if sum("STG.E.128" in line for line in lines) < stores:
                found.append(f"{name} lacks 128-bit stores")
        if "bf16" in name and "reduce" not in name:
            if not any("MUFU.EX2" in line for line in lines) or any("MUFU.TANH" in line for line in lines):
                found.append(f"{name} does not use ex2, or uses tanh.approx")
        if "reduce" not in name and "f64" not in name and not has_constant(lines, 0.1029432395800234874176221):
            found.append(f"{name} lacks the constant 0.10294323958")
    return found


def has_constant(lines: list[str], value: float) -> bool:
    """The float nearest to `value`, of either sign: as a number, as its bits, or as the two halves of an HFMA2."""
    (single,) = struct.unpack("f", struct.pack("f", value))
    (bits,) = struct.unpack("I", struct.pack("f", value))
    words = {f"{bits:#x}", f"{bits | 0x80000000:#x}", f"-{2**32 - (bits | 0x80000000):#x}"}
    for line in lines:
        numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?(?=[,\s]|$)", line)]
        if any(abs(abs(n) - single) < 1e-9 for n in numbers) or any(w in line for w in words):
            return True
        if "HFMA2" in line and len(numbers) >= 2 and max(map(abs, numbers[-2:])) < 65504:
            high, low = (struct.unpack("H", struct.pack("e", n))[0] for n in numbers[-2:])
            if (high << 16 | low) & 0x7FFFFFFF == bits:
                return True
    return False


@pytest.mark.parametrize("arch", ARCHS)
def test_machine_code(nvcc, cuobjdump, tmp_path, arch):
    sources = patched_sources(tmp_path / "csrc", None)
    compile_kernels(nvcc, sources, tmp_path / "k.cubin", "-cubin", f"-arch={arch}")
    code, registers = read(cuobjdump, tmp_path / "k.cubin")
    assert len(code) == 52 and set(code) == set(registers)
    assert problems(code, registers) == []
    # Few enough instructions to stay bound by memory: 27 an element would be the limit on an H200, 18 on a B200.
    body = [line for line in code["gelu_forward_bf16_vec"] if not line.startswith(("NOP", "BRA"))]
    assert len(body) / 17 < 14  # two packs of eight, and one element of the tail


PLANTED = {
    "constant": ("gelu_math.h", "#define GELU_B 0.1029432395800234874176221", "#define GELU_B 0.1029087", "constant"),
    # Loads of single elements, which is what is left where a pointer's alignment cannot be relied on.
    "unaligned": ("gelu_kernels.h", "if constexpr (sizeof(to) % 16 == 0) {", "if constexpr (false) {", "128-bit loads"),
    # Eight packs in flight do not fit into 32 registers.
    "spills": ("gelu_kernels.h", "Op::kInputs == 1 ? 2 : 1", "Op::kInputs == 1 ? 8 : 1", "spills"),
}


@pytest.mark.parametrize("fault", ["constant", "unaligned", "spills"])
def test_planted_faults_are_caught(nvcc, cuobjdump, tmp_path, fault):
    name, old, new, words = PLANTED[fault]
    sources = patched_sources(tmp_path / "csrc", None)
    text = (sources / name).read_text()
    assert old in text
    (sources / name).write_text(text.replace(old, new, 1))
    compile_kernels(nvcc, sources, tmp_path / "k.cubin", "-cubin", "-arch=sm_90")
    assert any(re.search(words, problem) for problem in problems(*read(cuobjdump, tmp_path / "k.cubin")))
