"""One host's part: the agent, and on the leader the coordinator. MLX lives in `engine` only."""
