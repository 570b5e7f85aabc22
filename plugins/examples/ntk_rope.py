"""A position of your own: RoPE for contexts that are longer than the one of training.

python train.py plugins=[plugins/examples/ntk_rope.py] --config-dir plugins/examples/conf position=ntk_rope \
    model.context_length=64
"""

from gptframe import UserError, register
from gptframe.model.position import RoPE


@register("position", "ntk_rope")
class NTKRoPE(RoPE):
    """RoPE with base * factor^(d / (d - 2)): the slowest pair turns `factor` times slower, the fastest as before
    ("NTK-aware" interpolation, bloc97, 2023; Peng et al., YaRN, 2023, section 3.1).

    Args:
        factor: how many times longer the context is than the one of training.
    """

    def __init__(self, cfg, factor: float = 2.0, base: float = 10000.0, pairing: str = "interleaved"):
        if not factor > 1:
            raise UserError(f"model.position.factor={factor} must be greater than 1; for plain RoPE use position=rope")
        if cfg.head_dim < 4:
            raise UserError(f"model.position.name=ntk_rope needs a head dimension of at least 4, not {cfg.head_dim}")
        super().__init__(cfg, base * factor ** (cfg.head_dim / (cfg.head_dim - 2)), pairing)
