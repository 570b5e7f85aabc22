"""The model: everything from token ids to logits and loss. Imports torch, and neither Hydra nor Lightning."""

from gptframe.model.gpt import GPT, Context, KVCache, build_model

__all__ = ["GPT", "Context", "KVCache", "build_model"]
