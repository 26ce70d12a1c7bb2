"""What engines need of mlx-lm without transformers and huggingface_hub, which it imports for tokenizers and
downloads.

Engines read no text and load nothing from a hub, and these two are most of what an engine computes before it
can load: with them, each recovery would begin more than a second later on every host. So while mlx-lm is
imported, stand-ins have the few names that its modules take from them; afterwards importing them gives the
real ones again.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

_NAMES = {
    "transformers": ("AutoTokenizer", "PreTrainedTokenizer", "PreTrainedTokenizerFast"),
    "transformers.tokenization_utils_base": ("PreTrainedTokenizerBase",),
    "huggingface_hub": ("snapshot_download",),
}
_MODULES = ("mlx_lm.generate", "mlx_lm.tuner.utils")


class _Absent:
    """In the place of a tokenizer class or of a download."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("engines have no tokenizer and download nothing")

    @classmethod
    def register(cls, *_: Any, **__: Any) -> None:
        """mlx-lm makes its own tokenizers known, to nobody."""


def import_mlx_lm() -> None:
    """Import it. A version of mlx-lm that takes other names gets the real ones."""
    absent = {name: names for name, names in _NAMES.items() if name.partition(".")[0] not in sys.modules}
    if "mlx_lm" in sys.modules or not absent:
        _import()
        return
    for module, names in absent.items():
        stand_in = types.ModuleType(module)
        stand_in.__path__ = []
        for name in names:
            setattr(stand_in, name, type(name, (_Absent,), {}))
        sys.modules[module] = stand_in
    try:
        _import()
        return
    except ImportError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_lm"]:
            del sys.modules[name]
    finally:
        for name in absent:
            sys.modules.pop(name, None)
    _import()


def _import() -> None:
    for name in _MODULES:
        importlib.import_module(name)
