"""What one token makes a layer read and compute: of experts only those that a router chooses."""

from __future__ import annotations

from typing import Any

_CHOSEN_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "num_experts_per_topk",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "num_selected_experts",
    "moe_router_topk",
    "top_k",
)


def chosen_experts(config: dict[str, Any]) -> int:
    """How many experts of a layer a token goes to; 0 = none, or the config does not say."""
    for part in (config, config.get("text_config") or {}, config.get("ffn_config") or {}):
        for key in _CHOSEN_KEYS:
            value = part.get(key) if isinstance(part, dict) else None
            if isinstance(value, list):
                value = max((item for item in value if isinstance(item, int)), default=0)
            if isinstance(value, int) and value > 0:
                return value
    return 0


def activity(layer: Any, num_chosen: int) -> tuple[int, int]:
    """(bytes read, parameters multiplied with) for one token."""
    num_bytes = num_parameters = 0
    for module in layer.modules():
        own: dict[str, Any] = {name: value for name, value in module.items() if hasattr(value, "nbytes")}
        weight: Any = own.get("weight")
        is_experts = weight is not None and weight.ndim == 3 and "Switch" in type(module).__name__
        part, whole = (min(num_chosen, weight.shape[0]), weight.shape[0]) if is_experts else (1, 1)
        if is_experts and not num_chosen:
            part = whole
        num_bytes += sum(int(array.nbytes) for array in own.values()) * part // whole
        if weight is not None and weight.ndim >= 2:
            num_parameters += _elements(module, weight) * part // whole
    return num_bytes, num_parameters


def quantization_of(config: dict[str, Any]) -> str:
    """For people: "4 bit, groups of 64"; '' when the config names none."""
    found = config.get("quantization") or config.get("quantization_config")
    if not isinstance(found, dict) or "bits" not in found:
        return ""
    mode = found.get("mode", "affine")
    text = f"{found['bits']} bit, groups of {found.get('group_size', 64)}"
    return text if mode == "affine" else f"{text}, {mode}"


def _elements(module: Any, weight: Any) -> int:
    bits = getattr(module, "bits", 0) if "scales" in module else 0
    size = int(weight.size)
    return size * 32 // bits if bits else size
