"""Backends: local (transformers), http (any OpenAI-compatible server), function (a Python function, or a script)."""
