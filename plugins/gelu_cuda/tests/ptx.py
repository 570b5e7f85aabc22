"""A small interpreter of the PTX that nvcc emits: runs a kernel without a GPU, all threads in step, and watches memory.

Every register is an array over all threads. Threads that disagree about a branch are run lowest program counter first,
so that they meet again after it. Every access must lie inside one buffer and on a multiple of its width; every byte
written is counted. The two approximate instructions are computed exactly and then moved by `error` times their
documented error bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

_WIDTH = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4}
_WIDTH |= {"b64": 8, "u64": 8, "s64": 8, "f64": 8}
_TYPE = {"u8": np.uint8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "b32": np.uint32, "u32": np.uint32}
_TYPE |= {"s32": np.int32, "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class MemoryFault(Exception):
    """An access outside every buffer, or not on a multiple of its width."""


@dataclass
class Buffer:
    """Global memory: `data` at address `base`; `written` counts stores to each byte."""

    data: np.ndarray
    base: int
    written: np.ndarray = field(init=False)

    def __post_init__(self):
        self.written = np.zeros(self.data.size, np.int64)


def parse(text: str) -> dict[str, list[tuple]]:
    """PTX text -> entry name -> [(guard, negated, opcode, operands)], labels as ("label", name)."""
    kernels = {}
    for part in re.split(r"\.visible \.entry ", text)[1:]:
        name = re.match(r"\w+", part)[0]
        body = part[part.index("{") + 1 :]
        body = body[: body.index("\n}")]
        program = []
        for line in re.sub(r"//[^\n]*", "", body).replace("\t", " ").split("\n"):
            line = line.strip()
            if label := re.fullmatch(r"(\$\w+):", line):
                program.append(("label", label[1]))
            elif shared := re.search(r"\.shared .*?(\w+)\[(\d+)\];", line):
                program.append(("shared", shared[1], int(shared[2])))
            elif line and not line.startswith((".", "{", "}")):
                for statement in filter(None, (s.strip() for s in line.split(";"))):
                    guard = re.match(r"@(!?)(%p\d+)\s+", statement)
                    rest = statement[guard.end() :] if guard else statement
                    opcode, _, operands = rest.partition(" ")
                    program.append((guard and guard[2], guard and guard[1] == "!", opcode, _operands(operands)))
        for shared in re.finditer(r"\.shared [^;]*?(\w+)\[(\d+)\];", text):
            program.insert(0, ("shared", shared[1], int(shared[2])))
        kernels[name] = program
    return kernels


def _operands(text: str) -> list:
    found = []
    for piece in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", text):
        found.append([p.strip() for p in piece[1:-1].split(",")] if piece[0] == "{" else piece)
    return found


class Machine:
    """Runs one kernel over `blocks` blocks of `threads` threads."""

    def __init__(self, program, params, buffers, blocks, threads, first_block=0, error=0.0):
        self.labels = {}
        self.code = []
        self.shared_at, size = {}, 0
        for row in program:
            if row[0] == "label":
                self.labels[row[1]] = len(self.code)
            elif row[0] == "shared":
                if row[1] not in self.shared_at:
                    self.shared_at[row[1]] = size
                    size += row[2]
            else:
                self.code.append(row)
        self.params, self.buffers, self.error = params, buffers, error
        self.n = blocks * threads
        self.tid = np.tile(np.arange(threads, dtype=np.uint32), blocks)
        self.block = np.repeat(np.arange(blocks), threads)
        self.ctaid = (self.block + first_block).astype(np.uint32)
        self.ntid = threads
        self.shared = np.zeros((blocks, max(size, 1)), np.uint8)
        self.regs: dict[str, np.ndarray] = {}
        self.executed: dict[str, int] = {}

    def run(self, limit=100_000):
        pc = np.zeros(self.n, np.int64)
        end = len(self.code)
        with np.errstate(all="ignore"):
            for _ in range(limit):
                low = int(pc.min())
                if low >= end:
                    return
                mask = pc == low
                guard, negated, opcode, operands = self.code[low]
                live = mask if guard is None else mask & (self.regs[guard] ^ bool(negated))
                pc[mask] = low + 1
                self.executed[opcode] = self.executed.get(opcode, 0) + int(live.sum())
                if opcode.startswith("bra"):
                    pc[live] = self.labels[operands[0]]
                elif opcode in ("ret", "exit"):
                    pc[live] = end
                elif opcode.startswith("bar"):
                    for block in np.unique(self.block[mask]):
                        waiting = mask[self.block == block]
                        assert (waiting | (pc[self.block == block] >= end)).all(), (
                            "a barrier that not all threads reach"
                        )
                elif live.any():
                    self.step(opcode, operands, live)
        raise RuntimeError("the kernel does not end")

    # ---- operands ----

    def get(self, operand, kind):
        dtype = _TYPE[kind]
        if operand.startswith("%tid.x"):
            return self.tid.astype(dtype)
        if operand.startswith("%ctaid.x"):
            return self.ctaid.astype(dtype)
        if operand.startswith("%ntid.x"):
            return np.full(self.n, self.ntid, dtype)
        if operand in self.shared_at:
            return np.full(self.n, self.shared_at[operand], dtype)
        if operand.startswith("%"):
            value = self.regs[operand]
            width = np.dtype(dtype).itemsize
            raw = value.view(_BITS[value.dtype.itemsize])
            return raw.astype(_BITS[width]).view(dtype)
        if operand.startswith("0f"):
            return np.full(self.n, np.uint32(int(operand[2:], 16))).view(dtype)
        if operand.startswith("0d"):
            return np.full(self.n, np.uint64(int(operand[2:], 16))).view(dtype)
        return np.full(
            self.n, int(operand, 0) & (2 ** (8 * np.dtype(dtype).itemsize) - 1), _BITS[np.dtype(dtype).itemsize]
        ).view(dtype)

    def put(self, operand, value, live):
        if operand == "_":
            return
        old = self.regs.get(operand)
        if old is None or old.dtype.itemsize != value.dtype.itemsize:
            old = np.zeros(self.n, value.dtype)
        self.regs[operand] = np.where(live, value, old.view(value.dtype))

    # ---- memory ----

    def address(self, operand):
        match = re.fullmatch(r"\[(%?\w+)(?:\+(-?\d+))?\]", operand)
        base, offset = match[1], int(match[2] or 0)
        return base, offset

    def where(self, operand, width, live):
        base, offset = self.address(operand)
        address = self.get(base, "u64").astype(np.int64) + offset
        if (address[live] % width).any():
            raise MemoryFault(f"an access of {width} bytes at an address that is no multiple of {width}")
        return address

    def memory(self, opcode, operands, live):
        space, kind = opcode.split(".")[1], opcode.split(".")[-1]
        lanes = int(next((p[1:] for p in opcode.split(".") if re.fullmatch(r"v[24]", p)), 1))
        width, store = _WIDTH[kind], opcode.startswith("st")
        where, registers = (operands[0], operands[1]) if store else (operands[1], operands[0])
        registers = registers if isinstance(registers, list) else [registers]
        if space == "shared":
            base, offset = self.address(where)
            address = self.get(base, "u32").astype(np.int64) + offset
            memory, block = self.shared, self.block
            if store:
                for j, register in enumerate(registers):
                    raw = self.get(register, kind).view(np.uint8).reshape(self.n, width)
                    for b in range(width):
                        memory[block[live], address[live] + j * width + b] = raw[live, b]
            else:
                for j, register in enumerate(registers):
                    raw = np.zeros((self.n, width), np.uint8)
                    for b in range(width):
                        raw[live, b] = memory[block[live], address[live] + j * width + b]
                    self.put(register, raw.reshape(-1).view(_TYPE[kind]), live)
            return
        address = self.where(where, width * lanes, live)
        got = np.zeros((self.n, lanes * width), np.uint8)
        if store:
            got = np.concatenate([self.get(r, kind).view(np.uint8).reshape(self.n, width) for r in registers], axis=1)
        todo = live.copy()
        for buffer in self.buffers:
            inside = todo & (address >= buffer.base) & (address + lanes * width <= buffer.base + buffer.data.size)
            at = address[inside] - buffer.base
            for b in range(lanes * width):
                if store:
                    buffer.data[at + b] = got[inside, b]
                    np.add.at(buffer.written, at + b, 1)
                else:
                    got[inside, b] = buffer.data[at + b]
            todo &= ~inside
        if todo.any():
            raise MemoryFault("an access outside every buffer")
        if not store:
            for j, register in enumerate(registers):
                column = np.ascontiguousarray(got[:, j * width : (j + 1) * width])
                self.put(register, column.reshape(-1).view(_TYPE[kind]), live)

    # ---- arithmetic ----

    def step(self, opcode, operands, live):
        name, *mods = opcode.split(".")
        kind = mods[-1] if mods else ""
        if opcode.startswith("ld.param"):
            name, offset = self.address(operands[1])
            value = self.params[int(name.rsplit("_", 1)[1])]
            if isinstance(value, bytes):
                value = int.from_bytes(value[offset : offset + _WIDTH[kind]], "little")
            return self.put(operands[0], np.full(self.n, value, _BITS[_WIDTH[kind]]).view(_TYPE[kind]), live)
        if name in ("ld", "st"):
            return self.memory(opcode, operands, live)
        if name == "mov" and isinstance(operands[0], list):
            raw = self.get(operands[1], kind)
            piece = 8 * raw.dtype.itemsize // len(operands[0])
            for j, register in enumerate(operands[0]):
                part = (raw >> raw.dtype.type(j * piece)) & raw.dtype.type(2**piece - 1)
                self.put(register, part.astype(_BITS[piece // 8]), live)
            return None
        if name == "mov" and isinstance(operands[1], list):
            piece = 8 * _WIDTH[kind] // len(operands[1])
            value = np.zeros(self.n, _TYPE[kind])
            for j, register in enumerate(operands[1]):
                part = self.get(register, f"b{piece}").astype(_TYPE[kind])
                value |= part << _TYPE[kind](j * piece)
            return self.put(operands[0], value, live)
        out, sources = operands[0], operands[1:]
        if name == "cvta":
            return self.put(out, self.get(sources[0], "u64"), live)
        if name == "setp":
            return self.put(out, self.compare(mods, kind, sources), live)
        if kind == "pred":
            a, b = self.regs[sources[0]], self.regs[sources[1]] if len(sources) > 1 else None
            return self.put(out, {"or": lambda: a | b, "and": lambda: a & b, "not": lambda: ~a}[name](), live)
        if name == "selp":
            value = np.where(self.regs[sources[2]], self.get(sources[0], kind), self.get(sources[1], kind))
            return self.put(out, value, live)
        if name == "cvt":
            return self.put(out, self.convert(mods, sources), live)
        if name == "mul" and "wide" in mods:
            big = {"u32": np.uint64, "s32": np.int64}[kind]
            return self.put(out, self.get(sources[0], kind).astype(big) * self.get(sources[1], kind).astype(big), live)
        if name in ("shl", "shr"):
            a, by = self.get(sources[0], kind), self.get(sources[1], "u32").astype(_TYPE[kind])
            return self.put(out, a << by if name == "shl" else a >> by, live)
        args = [self.get(s, kind) for s in sources]
        return self.put(out, self.compute(name, mods, kind, args), live)

    def compare(self, mods, kind, sources):
        a, b = self.get(sources[0], kind), self.get(sources[1], kind)
        test = mods[0]
        if test.endswith("u") and kind.startswith("f") and test not in ("equ",):
            return getattr(self, "_" + test[:-1])(a, b) | np.isnan(a) | np.isnan(b)
        return getattr(self, "_" + test)(a, b)

    _lt, _le = staticmethod(np.less), staticmethod(np.less_equal)
    _gt, _ge = staticmethod(np.greater), staticmethod(np.greater_equal)
    _eq, _ne = staticmethod(np.equal), staticmethod(np.not_equal)

    def convert(self, mods, sources):
        to, source = mods[-2], mods[-1]
        if to in ("bf16", "bf16x2"):
            rounded = [_to_bf16(self.get(s, "f32")) for s in sources]
        elif to in ("f16", "f16x2"):
            rounded = [self.get(s, "f32").astype(np.float16).view(np.uint16) for s in sources]
        elif source == "f16":
            return self.get(sources[0], "u16").view(np.float16).astype(np.float32)
        else:
            return self.get(sources[0], source).astype(_TYPE[to])
        if to.endswith("x2"):  # the first source is the high half
            return (rounded[0].astype(np.uint32) << np.uint32(16)) | rounded[1].astype(np.uint32)
        return rounded[0]

    def compute(self, name, mods, kind, args):
        floating = kind.startswith("f")
        if name == "mov":
            return args[0]
        if name == "ex2":
            exact = np.exp2(args[0].astype(np.float64)) * (1 + self.error * 2.0**-22)
            return _flushed(exact.astype(np.float32))
        if name == "rcp":
            q = _flushed(args[0])
            return _flushed((1 / q.astype(np.float64) * (1 + self.error * 2.0**-23)).astype(np.float32))
        if name in ("fma", "mad"):
            if kind == "f32":  # the product is exact in float64
                wide = args[0].astype(np.float64) * args[1].astype(np.float64) + args[2].astype(np.float64)
                return wide.astype(np.float32)
            return args[0] * args[1] + args[2]
        if name in ("add", "sub", "mul"):
            return {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name](*args)
        if name in ("min", "max"):
            pick = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}[name]
            return pick[0 if floating and "NaN" not in mods else 1](*args)
        if name in ("div", "rem"):
            return args[0] // args[1] if name == "div" else args[0] % args[1]
        if name in ("and", "or", "xor"):
            return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name](*args)
        return {"neg": np.negative, "abs": np.abs, "not": np.bitwise_not}[name](args[0])


def _flushed(x):
    tiny = np.float32(2.0**-126)
    return np.where(np.abs(x) < tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def _to_bf16(x):
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)
