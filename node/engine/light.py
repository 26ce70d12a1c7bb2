"""What engines need of mlx-lm without transformers, which it imports for tokenizers.

Engines read no text, and transformers is more than half of what an engine computes before it can load: with
it, each recovery would begin a second later on every host. So while mlx-lm is imported, a stand-in has
the few names that its modules take from transformers; afterwards `import transformers` is the real one again.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

_NAMES = {
    "transformers": ("AutoTokenizer", "PreTrainedTokenizer", "PreTrainedTokenizerFast"),
    "transformers.tokenization_utils_base": ("PreTrainedTokenizerBase",),
}
_MODULES = ("mlx_lm.generate", "mlx_lm.tuner.utils")


class _Absent:
    """In the place of a tokenizer class."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("engines have no tokenizer")

    @classmethod
    def register(cls, *_: Any, **__: Any) -> None:
        """mlx-lm makes its own tokenizers known, to nobody."""


def import_mlx_lm() -> None:
    """Import them. A version of mlx-lm that takes other names gets the real transformers."""
    if "mlx_lm" in sys.modules or any(name in sys.modules for name in _NAMES):
        _import()
        return
    for module, names in _NAMES.items():
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
        for name in _NAMES:
            sys.modules.pop(name, None)
    _import()


def _import() -> None:
    for name in _MODULES:
        importlib.import_module(name)
