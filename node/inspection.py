"""Sizes and legal cuts of a model, from a short-lived child that may import MLX."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.types import VisionMode
from mlx_mesh.node.children import child_environment
from mlx_mesh.node.processes import describe_exit

_LAST_LINES = 15


async def inspect_model(
    program: Sequence[str],
    folder: Path,
    timeout_s: float,
    adapter: Path | None = None,
    vision: VisionMode = VisionMode.AUTO,
) -> ModelFootprint:
    """Run `program folder`, with the adapter if there is one; ModelFootprint is the last line of its stdout.

    Raises PlacementError with the child's own words when the model cannot be read or split at all.
    """
    process = await asyncio.create_subprocess_exec(
        *program,
        str(folder),
        *(["--adapter-path", str(adapter)] if adapter is not None else []),
        *(["--vision", vision.value] if vision is not VisionMode.AUTO else []),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd="/",
        env=child_environment(),
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        raise PlacementError(
            f"reading the sizes of the model in {folder} took longer than {timeout_s:g} s (spawn_s)."
        ) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    lines = out.splitlines()
    if process.returncode == 0 and lines:
        try:
            return msgspec.json.decode(lines[-1], type=ModelFootprint)
        except msgspec.MsgspecError as error:
            raise PlacementError(f"the sizes of the model in {folder} are not readable: {error}.") from error
    lines = (err or out).strip().splitlines()[-_LAST_LINES:]
    words = "".join(f"\n  {line.decode('utf-8', 'replace')}" for line in lines)
    how = describe_exit(process.returncode or 0)
    if process.returncode == -signal.SIGKILL:
        how += ", perhaps because this host is short of memory"
    raise PlacementError(
        f"the model in {folder} cannot be inspected: the process that reads its sizes {how}"
        + (f":{words}" if words else ", without a word.")
    )


class Inspector:
    """The same, asked once for all who ask at the same time."""

    def __init__(self, program: Sequence[str]) -> None:
        self._program = program
        self._asked: dict[tuple[Path, Path | None, VisionMode], asyncio.Task[ModelFootprint]] = {}
        self._num_waiting: Counter[tuple[Path, Path | None, VisionMode]] = Counter()

    async def sizes_of(
        self,
        folder: Path,
        timeout_s: float,
        adapter: Path | None = None,
        vision: VisionMode = VisionMode.AUTO,
    ) -> ModelFootprint:
        """Raises PlacementError."""
        key = (folder, adapter, vision)
        task = self._asked.get(key)
        if task is None:
            task = asyncio.create_task(inspect_model(self._program, folder, timeout_s, adapter, vision))
            self._asked[key] = task
            task.add_done_callback(lambda done: self._asked.pop(key, None))
        self._num_waiting[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._num_waiting[key] -= 1
            if not self._num_waiting[key] and not task.done():  # its child must not outlive us
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
