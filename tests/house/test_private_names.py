"""Private names of other packages stand in the files that are there for them, and nowhere else.

Ruff's SLF001 sees `other._name`. What is looked for here is what it does not see: imports, names
given as text, and attributes of `self` that a class of another package has made.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from tests.house.source import nodes, package_files

# Any private name of the packages that these wrap.
_WRAPPERS = (
    "nbaccel/base/torch_private.py",
    "nbaccel/base/ipython_private.py",
    "nbaccel/deepspeed/library.py",
)

# Packages with one or two of them, in the file that handles the package.
_ALLOWED = {
    # Accelerate's state, what Lightning found when it was imported, and a method of Trainer.
    "nbaccel/base/training_libraries.py": {
        *("_shared_state", "_reset_state", "_IS_INTERACTIVE", "_move_model_to_device")
    },
    # Models of transformers say by these what must not be split, and that they tie weights.
    "nbaccel/bigmodel/module_sizes.py": {"_no_split_modules", "_tie_weights"},
    "nbaccel/devices/tpu/torch_tpu_driver.py": {
        *("_C", "_get_privateuse1_backend_name", "_get_cache_stats")
    },
    "nbaccel/devices/tpu/torch_xla_driver.py": {"_XLAC", "_xla_runtime_is_initialized"},
    "nbaccel/strategies/model_blocks.py": {"_no_split_modules"},  # transformers' models name it
    "nbaccel/utils/imports.py": {"_get_device_type"},  # of habana_frameworks
}


# Documented, in spite of the underscore.
_PUBLIC = {
    *("_asdict", "_fields", "_make", "_replace"),  # named tuples
    *("_current_frames", "_exit", "_getframe", "_thread"),  # os and sys; a module
    "_render_traceback_",  # IPython's protocol for errors
}


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names that a module gives to its own functions, classes, fields and attributes."""
    for node in nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Tuple(elts=parts):  # `__slots__`
                yield from (part.value for part in parts if isinstance(part, ast.Constant))


@functools.cache
def _own() -> frozenset[str]:
    return frozenset(name for file in package_files() for name in _defined(file.tree))


def _used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each private name that is somebody else's."""
    own = {*_defined(tree)}
    for node in nodes(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                is_ours = module.startswith("nbaccel")
                used = {*module.split("."), *(alias.name for alias in names if not is_ours)}
            case ast.Import(names=names):
                used = {part for alias in names for part in alias.name.split(".")}
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                used = {name} - _own()
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[_, ast.Constant(value=name), *_],
            ):
                used = {name} - own
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=name)
            ):
                used = {name}
            case _:
                continue
        yield from ((node.lineno, name) for name in used - _PUBLIC if _is_private(name))


def test_private_names_of_others_stand_in_their_files_only():
    """Through the wrappers a missing name is reported with what is lost."""
    found = {
        (file.name, name): f"{file.name}:{line}: {name}"
        for file in package_files()
        if not file.name.startswith(_WRAPPERS)
        for line, name in _used(file.tree)
    }
    allowed = {(file, name) for file, names in _ALLOWED.items() for name in names}
    assert [where for place, where in found.items() if place not in allowed] == []
    assert allowed - found.keys() == set(), "allowed, and used no more"
