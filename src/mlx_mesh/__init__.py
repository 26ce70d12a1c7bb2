"""Serve one MLX model over several machines."""
__version__ = "0.1.0"
