"""What the model's folder says about it, for lists of models: read once, no weight is opened."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Empty where the folder does not say."""

    family: str
    quantization: str
    size_bytes: int  # of the weight files
    digest: str  # of config.json
    modified_at: str

    @classmethod
    def read(cls, folder: Path) -> ModelCard:
        """Never raises: a list of models is not the place to find a broken folder."""
        try:
            raw = (folder / "config.json").read_bytes()
            config = json.loads(raw)
        except (OSError, ValueError):
            raw, config = b"", {}
        if not isinstance(config, dict):
            config = {}
        weights = [*folder.glob("*.safetensors"), *folder.glob("*.npz"), *folder.glob("*.gguf")]
        changed = folder.stat().st_mtime if folder.is_dir() else 0.0
        return cls(
            family=str(config.get("model_type") or ""),
            quantization=_quantization(config),
            size_bytes=sum(path.stat().st_size for path in weights),
            digest=hashlib.sha256(raw).hexdigest(),
            modified_at=datetime.fromtimestamp(changed, UTC).isoformat(),
        )


def _quantization(config: dict[str, Any]) -> str:
    quantization = config.get("quantization")
    if isinstance(quantization, dict) and "bits" in quantization:
        return f"Q{quantization['bits']}"
    return str(config.get("torch_dtype") or config.get("dtype") or "")
