"""headrace: a model file in, a production endpoint out."""

__version__ = "0.1.0"
