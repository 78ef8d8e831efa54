"""Private names of other packages stand in the files that are there for them, and nowhere else."""

from __future__ import annotations

import ast
import functools
import importlib
import sys

import pytest

from tests.house.private_names import defined, is_private, used
from tests.house.source import package_files

# Any private name of the packages that these wrap.
_WRAPPERS = (
    "nbaccel/base/torch_private.py",
    "nbaccel/base/ipython_private.py",
    "nbaccel/deepspeed/private_api.py",
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
    "nbaccel/workers/reaping.py": {
        # What Python does at the end of a process: atexit's, weakref's, threading's, and that of
        # multiprocessing.
        *("_clear", "_run_exitfuncs", "_registry", "_exitfunc", "_shutdown", "_run_finalizers")
    },
    "nbaccel/utils/imports.py": {"_get_device_type"},  # of habana_frameworks
}


@functools.cache
def _defined_in_package() -> frozenset[str]:
    return frozenset(name for file in package_files() for name in defined(file.tree))


def test_private_names_of_others_stand_in_their_files_only():
    """Through the wrappers a missing name is reported with what is lost."""
    elsewhere = [
        f"{file.name}:{line}: {name}"
        for file in package_files()
        if not file.name.startswith(_WRAPPERS)
        for line, name in used(file.tree, _defined_in_package())
        if name not in _ALLOWED.get(file.name, set())
    ]
    assert elsewhere == []


def test_what_is_allowed_isused():
    files = {file.name: file for file in package_files()}
    unused = [
        f"{path}: {name}"
        for path, names in _ALLOWED.items()
        for name in sorted(names - {found for _, found in used(files[path].tree, frozenset())})
    ]
    assert unused == []


def _overridden(tree: ast.Module) -> list[str]:
    """Private methods of other packages' classes that a class of this module replaces."""
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        bases = node.bases if isinstance(node, ast.ClassDef) else []
        for module, name in (imported[b.id] for b in bases if getattr(b, "id", "") in imported):
            if module.split(".")[0] not in ("nbaccel", "deepspeed", *sys.stdlib_module_names):
                base = getattr(importlib.import_module(module), name)
                methods = (m.name for m in node.body if isinstance(m, ast.FunctionDef))  # type: ignore[attr-defined]
                found += [m for m in methods if is_private(m) and hasattr(base, m)]
    return found


def test_no_private_method_of_others_is_replaced():
    """One that is renamed there would be called no more, and nobody would be told."""
    assert [(f.name, m) for f in package_files() for m in _overridden(f.tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        "from torch._subclasses import fake_tensor",
        "from torch.distributed.utils import _sync_module_states",
        "import torch._dynamo",
        "group._device_types",
        "dist.distributed_c10d._pg_map",
        "getattr(torch._C, 'x')",
        "hasattr(model, '_orig_mod')",
        "vars(shell)['_inspect'] = f",
        "class Scaler(GradScaler):\n    def f(self):\n        return self._per_optimizer_states",
    ],
)
def test_one_would_be_found(code):
    assert len(used(ast.parse(code), frozenset())) == 1


def test_ones_own_are_not_found():
    code = "class A:\n    def f(self, other):\n        self._a = other._a\n    def _b(self): ..."
    assert used(ast.parse(f"{code}\nA(None)._b()"), frozenset()) == []
