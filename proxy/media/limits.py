"""Bounds of what is taken as a picture. /v1/capabilities shows them and docs/media.md documents them."""

from __future__ import annotations

MAX_IMAGES = 32
"""Of one request, those of earlier turns included."""

MAX_IMAGE_BYTES = 20 * 1024 * 1024
"""Of one file, as it is."""

MAX_TOTAL_BYTES = 32 * 1024 * 1024
"""Of all files of one request: they travel to the engine in one message (`mesh.messages.MAX_FRAME_BYTES`)."""

MAX_SEQUENCE_BYTES = 256 * 1024 * 1024
"""Files of one request times its choices, each of which is a message of its own."""

MAX_PIXELS = 50_000_000
"""Width times height of one picture, read from its header: as RGBA that is 200 MB."""

LOW_DETAIL_PIXELS = 512 * 512
"""`detail: low` scales a picture down to so many pixels, where the model's processor can."""

FETCH_DEADLINE_S = 15.0
"""For one picture by URL: all names, connections, redirects and bytes."""

MAX_REDIRECTS = 3
MAX_URL_CHARS = 4096
