"""Pictures of requests: reading them, checking them, and their places in the prompt."""
