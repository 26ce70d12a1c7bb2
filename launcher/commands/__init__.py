"""The words of each command: its flags, and what it prints."""
