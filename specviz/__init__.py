"""specviz: chat with a model and watch speculative decoding as it happens."""

__all__ = ["__version__"]
__version__ = "0.1.0"
