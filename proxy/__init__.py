"""HTTP on the leader: OpenAI's API in front of the coordinator."""
