"""Looks inside a model before, during and after training: what it holds, what it computes, what it costs."""
