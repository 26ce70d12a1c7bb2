"""Models from host to host: short-lived processes that look, send, receive and fetch. None imports MLX.

Each is `python -m mlx_mesh.node.delivery.NAME`, told what to do by one line on stdin, and ends when stdin
does.
"""
