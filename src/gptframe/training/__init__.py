"""From a model and a token store to a trained run directory. Start with run.py."""
