"""Common pieces in, one dialect's events and answers out: one file for each dialect."""
