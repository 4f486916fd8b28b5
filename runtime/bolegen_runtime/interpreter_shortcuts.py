"""What Triton's interpreter makes anew at every operation, made once.

On the tiles that tests are made of, types cost more than numbers: each operation builds the
types of its blocks, and tuples of their sizes for each tensor. All of that follows from dtypes and
sizes, so equal ones share it. SHORTCUTS change no value; `interpreter.install()` puts them in.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as ti

__all__ = ["SHORTCUTS"]

Method: TypeAlias = Callable[..., Any]

OF_TENSORS = "bolegen_of_tensors"
"""The attribute of a type that holds what its tensors have in common."""


def _patch_once(original: Method) -> Method:
    """Patch the language once a launch, not again at each call of a device function.

    tl.sum is such a call: a millisecond each, after which tl.core stayed patched for good.
    """
    whole_language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    active: list[Any] = []

    def patch_lang(_: Any) -> Any:
        if active:
            return ti._LangPatchScope()
        active.append(original(whole_language))
        # for range(tensor): 3.6 converts an array of one element, which numpy 2.4 refuses
        active[0].set_attr(tl.core.tensor, "__index__", lambda self: int(self.handle.data.item()))
        return SimpleNamespace(restore=lambda: active.pop().restore())

    return patch_lang


def _share_types(original: Method) -> Method:
    """Block types of one dtype and one shape share their attributes, validated once."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [s.value if isinstance(s, tl.constexpr) else s for s in shape]
        # a pointer's name does not say where it points
        key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        if key not in known:
            original(self, element_ty, shape)
            known[key] = {**vars(self), OF_TENSORS: {}}
        vars(self).update(known[key])

    return init


def _share_shapes(original: Method) -> Method:
    """Tensors of one type share their shape and their number of elements."""

    def init(self: Any, handle: Any, type: Any) -> None:
        known = vars(type).setdefault(OF_TENSORS, {})
        if not known:
            original(self, None, type)
            known.update(vars(self))
        vars(self).update(known, handle=handle, type=type)

    return init


def _share_dtypes(original: Method) -> Method:
    """numpy's dtype of a type, looked up by name; the original makes its table at each call."""
    known: dict[str, Any] = {}

    def get_np_dtype(of: Any) -> Any:
        if of.name not in known:
            known[of.name] = original(of)
        return known[of.name]

    return get_np_dtype


def _skip_equal(original: Method) -> Method:
    """Blocks of one shape are not broadcast: their sizes need not be compared one by one."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return original(self, lhs, rhs)

    return broadcast


# in the form of interpreter.PATCHES
SHORTCUTS: tuple[tuple[Any, str, Callable[[Method], Method]], ...] = (
    (ti, "_patch_lang", _patch_once),
    (tl.block_type, "__init__", _share_types),
    (tl.tensor, "__init__", _share_shapes),
    (ti, "_get_np_dtype", _share_dtypes),
    (TritonSemantic, "broadcast_impl_value", _skip_equal),
)
