"""From each dialect's request to one common request, and from that to sequences."""
