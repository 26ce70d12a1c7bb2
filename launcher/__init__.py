"""From hosts to running agents, and back to none."""
