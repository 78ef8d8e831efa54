"""The modules whose names are public, and the list of these names.

    python -m tests.house.public_names      # after a name was added: puts it on the list

`public_names.txt` is what users were told; tests compare the package with it. Writing the list
takes no name off it, so that a lost name cannot be written away. It also has names of internal
modules that papers and messages showed before there was a list.
"""

from __future__ import annotations

import warnings
from importlib import import_module

from tests.house.source import ROOT

LIST = ROOT / "tests" / "house" / "public_names.txt"
_ACCELERATE = (
    *("accelerator", "big_modeling", "checkpointing", "data_loader", "hooks", "inference"),
    *("launchers", "local_sgd", "logging", "memory_utils", "optimizer", "parallelism_config"),
    *("scheduler", "state", "tracking", "utils"),
)
_OWN = ("config", "deepspeed", "errors")
_FOR_BACKENDS = (
    *("abc", "abc.asking", "abc.bundle", "abc.device", "abc.engine", "abc.place"),
    *("abc.precision", "abc.shards", "abc.standins", "abc.strategy", "capability_rows"),
)
MODULES = ("nbaccel", *(f"nbaccel.{name}" for name in (*_ACCELERATE, *_OWN, *_FOR_BACKENDS)))
"""In the order in which the page has them."""


def names_of(module_name: str) -> list[str]:
    """The public names of a module."""
    return sorted(set(import_module(module_name).__all__))


def offered() -> set[str]:
    """Every public name, with its module."""
    return {f"{module}.{name}" for module in MODULES for name in names_of(module)}


def listed() -> list[str]:
    """The lines of the list."""
    return LIST.read_text(encoding="utf-8").splitlines()


def why_gone(full_name: str) -> str:
    """Why a listed name is not public any more; empty if it is.

    A deprecated one need not be in `__all__`, if it warns when it is asked for.
    """
    module_name, _, name = full_name.rpartition(".")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = import_module(module_name)
            getattr(module, name)
    except (ImportError, AttributeError) as error:
        return str(error)
    # Warnings of other packages, imported by the way, have other texts.
    warned = [w for w in caught if issubclass(w.category, DeprecationWarning)]
    is_deprecated = any(name in str(warning.message) for warning in warned)
    return "" if is_deprecated or name in module.__all__ else f"not in {module_name}.__all__"


if __name__ == "__main__":
    LIST.write_text("\n".join(sorted({*listed(), *offered()})) + "\n", encoding="utf-8")
