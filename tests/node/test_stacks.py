"""Where an engine stood is read from what faulthandler printed."""

from __future__ import annotations

from mlx_mesh.node.stacks import where_it_stood, without_stacks

DUMP = """\
engine: something before
Thread 0x00007f4ec53646c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f4ec5dc5b80 (most recent call first):
  File "/x/zmq/sugar/socket.py", line 4 in recv_multipart
  File "/x/node/engine/plans.py", line 190 in next
  File "/x/node/engine/loop.py", line 262 in _follow
  File "/x/node/engine/loop.py", line 240 in run
  File "/x/node/engine/__main__.py", line 100 in main
  File "<string>", line 5 in <module>
""".splitlines()


def test_the_innermost_frames_of_the_main_thread_are_told() -> None:
    assert where_it_stood(DUMP) == (
        "recv_multipart (socket.py:4) < next (plans.py:190) < _follow (loop.py:262) < run (loop.py:240)"
    )


def test_output_without_a_dump_tells_nothing() -> None:
    assert where_it_stood(["a line", '  File "x.py", line 3 in f']) == ""


def test_what_was_said_before_a_dump_is_still_told() -> None:
    assert without_stacks(["a line", *DUMP, "another"]) == [
        "a line",
        "engine: something before",
        "",
        "another",
    ]
