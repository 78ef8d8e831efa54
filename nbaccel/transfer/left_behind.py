"""What belongs to one process, and what stands for it in another: weak references and bars.

A weak reference does not keep what it names, and one whose object is gone raises when it is merely
looked at (``isinstance`` asks for its class). Bars of tqdm hold the stream or widget that they are
drawn in, and a finished one in a notebook holds such a reference.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

__all__ = ["WEAK_TYPES", "is_bar", "reduce_bar", "reduce_weak"]

WEAK_TYPES = (weakref.ProxyType, weakref.CallableProxyType, weakref.ReferenceType)
"""Types of weak references, to be asked for by ``type``: ``isinstance`` may raise."""


def reduce_weak(reference: Any) -> Any:
    """Pickle a weak reference with what it names, if that is there."""
    is_proxy = type(reference) is not weakref.ReferenceType
    return _weak, (is_proxy, _referent(reference))


def _referent(reference: Any) -> Any:
    if type(reference) is weakref.ReferenceType:
        return reference()
    try:
        # What a proxy asks its object for is bound to the object.
        return reference.__repr__.__self__
    except (AttributeError, ReferenceError):
        return None


def _weak(is_proxy: bool, named: Any) -> Any:
    """A weak reference; to something that is gone at once, where there is nothing to name."""
    target = _Gone() if named is None else named
    return weakref.proxy(target) if is_proxy else weakref.ref(target)


class _Gone:
    """Something that is gone."""


def is_bar(object_type: type) -> bool:
    """Whether objects of a type are bars of tqdm."""
    module = sys.modules.get("tqdm.std")
    return module is not None and issubclass(object_type, module.tqdm)


def reduce_bar(bar: Any) -> Any:
    """Pickle a bar as one of the same numbers; one that has ended draws nothing."""
    has_ended = bool(bar.disable)
    settings = {
        "desc": None if has_ended else bar.desc.removesuffix(": "),
        "total": bar.total if not has_ended else None,
        "initial": bar.n,
        "disable": has_ended,
    }
    return _bar, (None if has_ended else bar.iterable, settings)


def _bar(iterable: Any, settings: dict[str, Any]) -> Any:
    from tqdm.auto import tqdm

    return tqdm(iterable, **settings)
