"""The killable child that owns MLX: one rank, one shard, one thread that makes all MLX calls."""
