"""One handler each: convert, stream, answer."""
