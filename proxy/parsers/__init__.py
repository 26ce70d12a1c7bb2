"""Tool parsers that mlx-lm does not have, with its interface."""
