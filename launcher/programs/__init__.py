"""Small programs that the launcher sends to a host's Python over stdin. They import the standard library
only and do not rely on mlx-mesh being installed there. Each has `main(marker, request)`, which prints one
line of `marker`, a space and JSON."""
