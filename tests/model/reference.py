"""An independent forward pass in NumPy float64, written from the papers' formulas; it shares no code with gptframe.

It reads a state dict as a mapping of names to arrays, and a plain dict of config values. Slow and literal on purpose:
heads are looped over, masks are spelled out token by token, and RoPE turns complex numbers.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

erf = np.vectorize(math.erf, otypes=[np.float64])


# Activations. Gated ones take (value, gate): Shazeer, "GLU Variants Improve Transformer", 2020.


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def gelu_tanh(x):
    """Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, the approximation with tanh."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def gelu_exact(x):
    """x times the normal distribution function."""
    return x * 0.5 * (1.0 + erf(x / math.sqrt(2.0)))


def relu(x):
    return np.where(x > 0, x, 0.0)


ACTIVATIONS = {
    "gelu_tanh": gelu_tanh,
    "gelu_exact": gelu_exact,
    "relu": relu,
    "squared_relu": lambda x: relu(x) ** 2,
    "silu": lambda x: x * sigmoid(x),
}
GATED = {
    "swiglu": lambda value, gate: value * gate * sigmoid(gate),
    "geglu": lambda value, gate: value * gelu_tanh(gate),
    "reglu": lambda value, gate: value * relu(gate),
}


# Norms.


def normalise(x, gain, shift, kind, eps):
    """LayerNorm (Ba et al., 2016) or RMSNorm (Zhang and Sennrich, 2019) over the last axis."""
    if kind == "layernorm":
        centred = x - x.mean(axis=-1, keepdims=True)
        y = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    else:
        y = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    if gain is not None:
        y = y * gain
    if shift is not None:
        y = y + shift
    return y


# name: (before the core, on its delta, after the addition, on the embeddings, at the end of the stack)
PLACEMENTS = {
    "pre": (1, 0, 0, 0, 1),
    "post": (0, 0, 1, 0, 0),
    "output": (0, 1, 0, 0, 1),
    "sandwich": (1, 1, 0, 0, 1),
    "peri": (1, 1, 0, 1, 1),
    "keel": (1, 0, 1, 0, 0),
    "deepnorm": (0, 0, 1, 0, 0),
    "none": (0, 0, 0, 0, 0),
}


def stream_factor(placement, n_layers, sublayers_per_layer):
    """DeepNorm's alpha = (2 N)^(1/4) for a decoder of N layers of two sublayers; Keel's alpha = number of sublayers."""
    n_sublayers = n_layers * sublayers_per_layer
    return {"deepnorm": n_sublayers**0.25, "keel": float(n_sublayers)}.get(placement, 1.0)


# Positions.


def frequencies(dim, base):
    return np.array([base ** (-2.0 * i / dim) for i in range(dim // 2)])


def sinusoid(positions, dim, base):
    """Vaswani et al., 2017, section 3.5."""
    table = np.zeros((len(positions), dim))
    for row, p in enumerate(positions):
        for i, w in enumerate(frequencies(dim, base)):
            table[row, 2 * i], table[row, 2 * i + 1] = math.sin(p * w), math.cos(p * w)
    return table


def slowed(w, scaling):
    """Frequencies of Chen et al., 2023 (linear), or of LLaMA 3.1's published `apply_scaling`, one by one."""
    if scaling is None:
        return w
    factor = scaling["factor"]
    if scaling["name"] == "linear":
        return w / factor
    low, high = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
    context, slow = scaling.get("original_context", 8192), []
    for one in w:
        wavelength = 2 * math.pi / one
        if wavelength < context / high:
            slow.append(one)
        elif wavelength > context / low:
            slow.append(one / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            slow.append((1 - smooth) * one / factor + smooth * one)
    return np.array(slow)


def turn(x, positions, dim, base, pairing, scaling=None):
    """ "RoFormer", 2021: pairs of the first `dim` entries of x[..., T, d], as complex numbers, times e^(i p w)."""
    if pairing == "interleaved":
        first, second = list(range(0, dim, 2)), list(range(1, dim, 2))
    else:
        first, second = list(range(dim // 2)), list(range(dim // 2, dim))
    z = x[..., first] + 1j * x[..., second]
    z = z * np.exp(1j * np.outer(positions, slowed(frequencies(dim, base), scaling)))
    y = x.copy()
    y[..., first], y[..., second] = z.real, z.imag
    return y


def slopes(n):
    """Press et al., "Train Short, Test Long", 2021, section 3 and its published code for n that is no power of 2."""
    if n & (n - 1) == 0:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]
    below = 1 << (n.bit_length() - 1)
    return slopes(below) + slopes(2 * below)[::2][: n - below]


# The model.


class Reference:
    """Logits of one model: `Reference(state_dict_as_numpy, config_as_dict)(ids, positions, documents)`."""

    def __init__(self, params, config):
        self.p = {name: np.asarray(value, dtype=np.float64) for name, value in params.items()}
        self.c = config
        self.used = set()

    def get(self, name):
        if name in self.p:
            self.used.add(name)
        return self.p.get(name)

    def linear(self, x, name):
        y = x @ self.get(name + ".weight").T
        shift = self.get(name + ".bias")
        return y if shift is None else y + shift

    def norm(self, x, name):
        section = self.c["norm"]
        gain, shift = self.get(name + ".weight"), self.get(name + ".bias")
        return normalise(x, gain, shift, section["name"], section.get("eps", 1e-5))

    @staticmethod
    def is_hidden(t, s, window, document):
        """A query at t may not see the key at s: it is later, too far back, or of another document."""
        return s > t or (window is not None and t - s >= window) or document[t] != document[s]

    def attention(self, x, name, options, positions, documents):
        c, (batch, length, width) = self.c, x.shape
        heads = c["n_heads"]
        kv_heads = options.get("n_kv_heads") or heads
        d = options.get("head_dim") or width // heads
        q, k, v = (self.linear(x, f"{name}.{part}") for part in "qkv")
        qk_norm = options.get("qk_norm", "none")
        if qk_norm == "full":
            q, k = self.norm(q, name + ".q_norm"), self.norm(k, name + ".k_norm")
        position = c["position"]
        hidden = np.array(
            [
                [[self.is_hidden(t, s, options.get("window"), document) for s in range(length)] for t in range(length)]
                for document in (documents or [[0] * length] * batch)
            ]
        )  # [batch, query, key]
        mixed = np.zeros((batch, length, heads * d))
        for h in range(heads):
            g = h * kv_heads // heads  # neighbouring query heads share a key head
            qh, kh, vh = q[..., h * d : (h + 1) * d], k[..., g * d : (g + 1) * d], v[..., g * d : (g + 1) * d]
            if qk_norm == "head":
                qh, kh = self.norm(qh, name + ".q_norm"), self.norm(kh, name + ".k_norm")
            if position["name"] == "rope":
                dim = int(d * position.get("fraction", 1.0))
                rest = (positions, dim, position.get("base", 10000.0), position.get("pairing", "interleaved"))
                rest += (position.get("scaling"),)
                qh, kh = turn(qh, *rest), turn(kh, *rest)
            scores = qh @ np.swapaxes(kh, -1, -2) / math.sqrt(d)
            if options.get("softcap"):
                scores = options["softcap"] * np.tanh(scores / options["softcap"])
            if position["name"] == "alibi":
                scores = scores - slopes(heads)[h] * np.subtract.outer(positions, positions)
            scores[hidden] = -np.inf
            pattern = np.exp(scores - scores.max(axis=-1, keepdims=True))
            pattern /= pattern.sum(axis=-1, keepdims=True)
            mixed[..., h * d : (h + 1) * d] = pattern @ vh
        return self.linear(mixed, name + ".out")

    def mlp(self, x, name):
        kind = self.c["activation"]["name"]
        if kind in GATED:
            return self.linear(
                GATED[kind](self.linear(x, name + ".up"), self.linear(x, name + ".gate")), name + ".down"
            )
        return self.linear(ACTIVATIONS[kind](self.linear(x, name + ".up")), name + ".down")

    def __call__(self, ids, positions=None, documents=None):
        c = self.c
        pre, out, post, embedding, final = PLACEMENTS[c["norm_placement"]["name"]]
        block = c["block"]
        alpha = c.get("residual_scale")
        if alpha is None:
            alpha = stream_factor(c["norm_placement"]["name"], c["n_layers"], len(block))
        ids = np.asarray(ids)
        positions = np.arange(ids.shape[1]) if positions is None else np.asarray(positions)

        x = self.get("token_embedding.weight")[ids] * c.get("embedding_scale", 1.0)
        if c["position"]["name"] == "learned":
            x = x + self.get("position.table.weight")[positions]
        if c["position"]["name"] == "sinusoidal":
            x = x + sinusoid(positions, c["d_model"], c["position"].get("base", 10000.0))
        if embedding:
            x = self.norm(x, "embedding_norm")
        for layer in range(c["n_layers"]):
            source, total = x, 0.0
            for kind in c.get("layers", {}).get(layer, block):
                name = f"blocks.{layer}.{kind}"
                entry = source if c["topology"] == "parallel" else x
                h = self.norm(entry, name + ".pre") if pre else entry
                if kind == "attention":
                    h = self.attention(h, name + ".core", c["attention"], positions, documents)
                else:
                    h = self.mlp(h, name + ".core")
                h = self.norm(h, name + ".out") if out else h
                total = total + h
                x = alpha * entry + h
                x = self.norm(x, name + ".post") if post else x
            if c["topology"] == "parallel":
                x = alpha * source + total
        if final:
            x = self.norm(x, "final_norm")
        head = self.get("token_embedding.weight" if c["tie_head"] else "head.weight")
        logits = x @ head.T
        cap = c.get("logit_softcap")
        return logits if cap is None else cap * np.tanh(logits / cap)


def cross_entropy(logits, targets, ignored=-100):
    """Sum over tokens of -log softmax(logits)[target]."""
    top = logits.max(axis=-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(axis=-1)) + top[..., 0]
    total = 0.0
    for index, target in np.ndenumerate(targets):
        if target != ignored:
            total += log_z[index] - logits[index][target]
    return total


# Initialisation.


def drawn(name, shape, seed):
    """Standard normal float32 values from (seed, name): Philox keyed by the first half of sha256("seed:name")."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    low, high = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8))
    generator = np.random.Generator(np.random.Philox(key=np.array([low, high], dtype=np.uint64)))
    return generator.standard_normal(shape, dtype=np.float32)


def init_std(name, shape, config):
    """GPT-2's 0.02 and 1/sqrt(2 N) (Radford et al., 2019), DeepNet's beta = (8 N)^(-1/4) (Wang et al., 2022)."""
    n, section = config["n_layers"], config["init"]
    std = section.get("std", 0.02)
    writes = name.endswith((".core.out.weight", ".core.down.weight"))
    if name in ("token_embedding.weight", "position.table.weight"):
        if section.get("embedding_std") is not None:
            return section["embedding_std"]
        ends_in_norm = config["norm_placement"]["name"] in ("post", "keel", "deepnorm")
        return min(std, 1.0 / config["d_model"]) if ends_in_norm and config["tie_head"] else std
    if name == "head.weight":
        return std
    if section["name"] == "deepnorm":
        feeds = name.endswith((".core.v.weight", ".core.up.weight", ".core.gate.weight"))
        return ((8 * n) ** -0.25 if writes or feeds else 1.0) * math.sqrt(2.0 / (shape[0] + shape[1]))
    return std / math.sqrt(2 * n) if writes else std
