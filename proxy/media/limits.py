"""Bounds of what is taken beside text. /v1/capabilities shows them and docs/media.md documents them."""

from __future__ import annotations

_MIB = 1024 * 1024

MAX_ITEMS = {"image": 32, "audio": 8, "video": 4}
"""Of one request, those of earlier turns included."""

MAX_FILE_BYTES = {"image": 20 * _MIB, "audio": 32 * _MIB, "video": 32 * _MIB}
"""Of one file, as it came."""

MAX_TOTAL_BYTES = 32 * _MIB
"""Of all files of one request, and of what is made of them for the engine: that travels in one message
(`mesh.messages.MAX_FRAME_BYTES`)."""

MAX_SEQUENCE_BYTES = 256 * _MIB
"""What the engine gets of one request times its choices, each of which is a message of its own."""

MAX_PIXELS = 50_000_000
"""Width times height of one picture, read from its header: as RGBA that is 200 MB."""

MAX_TOTAL_PIXELS = 400_000_000
"""Of all pictures of one request together: 32 of 12.5 megapixels. The engine reads nothing else meanwhile."""

LOW_DETAIL_PIXELS = 512 * 512
"""`detail: low` scales a picture down to so many pixels, where the model's processor can."""

MAX_AUDIO_S = 600.0
"""Of one audio: 19 MB at 16 kHz."""

MAX_FRAMES = 768
"""Of one video, that the model may see; mlx-vlm's own default."""

MAX_FRAME_PIXELS = 4096 * 2304
"""Width times height of a video, from its header and again from each frame."""

MAX_VIDEO_PIXELS = 64_000_000
"""Of all chosen frames of one video together: larger ones are scaled down."""

MAX_PNG_PIXELS = 8_000_000
"""Up to here chosen frames are kept without loss, beyond it as JPEG."""

MAX_PACKETS = 500_000
"""Of one file, all of its streams together: four hours of film with sound."""

DECODE_DEADLINE_S = 30.0
"""For one audio or video, in a process of its own."""

DECODE_TURN_S = 60.0
"""For the turn of a file: few are decoded together. For a picture until it is decoded."""

NUM_DECODERS = 2

FETCH_DEADLINE_S = 15.0
"""For one file by URL: all names, connections, redirects and bytes."""

MAX_REDIRECTS = 3
MAX_URL_CHARS = 4096
