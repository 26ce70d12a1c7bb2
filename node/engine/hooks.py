"""Put our own code around a layer's or model's `__call__` without touching the model's source.

A hooked object gets a subclass of its own class, so attributes, `isinstance`, list positions and everything
else that the model's code looks at stay what they were. What the hook needs is stored on the instance:
several ranks' models can live in one process (the tests' simulator does that).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Original = Callable[..., Any]


class CallRuntime(Protocol):
    """Decides what happens when a hooked layer or the hooked model is called."""

    def call_layer(
        self, index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Stand in for layer `index`; `original(*args, **kwargs)` runs the layer itself."""
        ...

    def call_model(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for the model's own call."""
        ...


@dataclass(slots=True, eq=False)
class _Hook:
    # Not a tuple or dict: mlx's Module would take those for parameters.
    runtime: CallRuntime
    index: int
    unhooked: type


_hooked_classes: dict[tuple[type, bool], type] = {}


def _hooked_class(cls: type, is_model: bool) -> type:
    known = _hooked_classes.get((cls, is_model))
    if known is not None:
        return known
    base: Any = cls

    def call_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook: _Hook = self._mesh_hook

        def original(*a: Any, **k: Any) -> Any:
            return base.__call__(self, *a, **k)

        return hook.runtime.call_layer(hook.index, original, args, kwargs)

    def call_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook: _Hook = self._mesh_hook

        def original(*a: Any, **k: Any) -> Any:
            return base.__call__(self, *a, **k)

        return hook.runtime.call_model(original, args, kwargs)

    body = {"__call__": call_model if is_model else call_layer, "__module__": cls.__module__}
    made = type(cls.__name__, (cls,), body)
    _hooked_classes[cls, is_model] = made
    return made


def _hook(obj: Any, runtime: CallRuntime, index: int, is_model: bool) -> None:
    cls = type(obj)
    obj.__class__ = _hooked_class(cls, is_model)
    obj._mesh_hook = _Hook(runtime, index, cls)


def hook_model(model: Any, layers: Sequence[Any], runtime: CallRuntime) -> None:
    """Route calls of `model` and of each layer object through `runtime`. A layer object that stands in the
    list twice keeps its first index."""
    for index, layer in enumerate(layers):
        if "_mesh_hook" not in vars(layer):
            _hook(layer, runtime, index, is_model=False)
    _hook(model, runtime, -1, is_model=True)


def unhook_model(model: Any, layers: Sequence[Any]) -> None:
    """Undo `hook_model`."""
    for obj in (*layers, model):
        hook = vars(obj).get("_mesh_hook")
        if hook is not None:
            obj.__class__ = hook.unhooked
            del obj._mesh_hook
