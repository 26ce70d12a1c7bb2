"""What requests hold beside text crosses processes whole."""

from __future__ import annotations

import msgspec

from mlx_mesh.mesh.messages import GenerateRequest, Media, ProxyRequest, Submit, Video, encode

VIDEO = Video(frames=(b"one", b"three"), fps=0.5, times=(0.0, 2.125))


def test_files_of_all_kinds_come_back_as_they_were_sent() -> None:
    media = Media(text="<a><v>", images=(b"p",), audios=(b"\0\xff", b""), videos=(VIDEO, VIDEO))
    sent = Submit(request=GenerateRequest(id="1", prompt_ids=(1, 2), max_tokens=3, media=media))
    assert msgspec.msgpack.decode(encode(sent), type=ProxyRequest) == sent


def test_the_bytes_of_all_files_count() -> None:
    media = Media(text="long text", images=(b"12", b"3"), audios=(b"4567",), videos=(VIDEO, VIDEO))
    assert media.num_bytes == 3 + 4 + 16
    assert Media(text="text").num_bytes == 0
