"""gptframe: a training framework for GPT models in which the architecture is configuration."""

from gptframe.errors import UserError
from gptframe.registry import register

__version__ = "0.1.0"
__all__ = ["UserError", "__version__", "register"]
