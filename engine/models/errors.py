"""What is wrong with a model, said in a sentence."""

from __future__ import annotations


class ModelError(ValueError):
    """A model can't be loaded. The message is a sentence for the operator: what is wrong, where, and what would do."""
