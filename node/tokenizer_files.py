"""Whether a model folder has a tokenizer, told from its files without loading it."""

from __future__ import annotations

from pathlib import Path

import msgspec

_VOCABULARIES = ("tokenizer.json", "tokenizer_config.json", "*.model", "*.tiktoken", "vocab.*")


def tokenizer_problem(folder: Path) -> str:
    """Why HTTP could not be served from this folder, with the fix; '' when nothing speaks against it.

    Only what is plain from outside is told: the proxy has the last word when it loads the tokenizer.
    """
    if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES):
        return (
            f"{folder} has no tokenizer: none of tokenizer.json, tokenizer.model, *.tiktoken or "
            "tokenizer_config.json is there. Copy or download the tokenizer files of this model."
        )
    for name, needed in (("tokenizer.json", "model"), ("tokenizer_config.json", "")):
        path = folder / name
        try:
            found = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        except FileNotFoundError:
            continue
        except (OSError, msgspec.MsgspecError) as error:
            return f"{path} cannot be read ({error}). Copy or download it again."
        if needed and needed not in found:
            return f"{path} is not a tokenizer: it has no `{needed}`. Copy or download it again."
    return ""
