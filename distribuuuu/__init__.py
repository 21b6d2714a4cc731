"""distribuuuu: config-driven image-classification training."""

__version__ = "0.1.0"
