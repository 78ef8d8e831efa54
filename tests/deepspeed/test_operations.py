"""What builds DeepSpeed's operations for the tests: the same objects, and nothing left to build."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from nbaccel.deepspeed import library
from tests.deepspeed import compiler, needs, operations

HEADER = "struct Unguarded { int value; };\n"
FILES = {
    "one.h": HEADER,
    "one.cpp": '#include "one.h"\nint two();\nint three();\n'
    "int main() { Unguarded it{two() + three()}; return it.value; }\n",
    "two.cpp": '#include "one.h"\nint two() { return Unguarded{2}.value; }\n',
    "cpu/comm/three.cpp": "static const int name = 3;\nint three() { return name; }\n",
}


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_files_compiled_at_once_make_the_same_program(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sources = [tmp_path / name for name in FILES if name.endswith(".cpp")]
    plan = "".join(f"build {source.stem}.o: compile {source}\n" for source in sources)
    (tmp_path / "build.ninja").write_text(plan)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # both are set on the way, and restored
    monkeypatch.setenv("TORCH_DONT_CHECK_COMPILER_ABI", "1")
    monkeypatch.setenv(compiler.REAL, "")
    (tmp_path / "bin").mkdir()
    compiler.put_on_path(tmp_path / "bin")
    for source in sources:
        subprocess.run(["c++", "-O3", "-c", source, "-o", f"{source.stem}.o"], check=True)
    subprocess.run(["c++", "one.o", "two.o", "three.o", "-o", "program"], check=True)
    assert subprocess.run([tmp_path / "program"], check=False).returncode == 5
    symbols = subprocess.run(["nm", "two.o"], capture_output=True, check=True).stdout
    assert not symbols, "its function is in the first file's object"


@pytest.mark.parametrize("name", operations.ENGINE + operations.DISK)
def test_what_was_built_is_what_deepspeed_would_build(name, monkeypatch):
    """Else every test process would build it once more."""
    if operations.not_built((name,)):
        pytest.skip(f"{name} is not built here")
    monkeypatch.setenv("PATH", library.path_with_ninja() or "")
    done = subprocess.run(
        ["ninja", "-n"], cwd=operations.folder() / name, capture_output=True, text=True, check=True
    )
    assert "no work to do" in done.stdout


def test_where_operations_are_missing_the_skip_says_which(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    made = tmp_path / "cpu_adam" / "cpu_adam.so"
    made.parent.mkdir()
    made.touch()
    mark = needs._built(operations.ENGINE)
    assert mark.args == (True,)
    assert "['deepspeed_shm_comm', 'fused_adam'] are not built" in mark.kwargs["reason"]


def test_what_a_machine_lacks_is_named_by_its_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert operations.missing_packages()[0] == "g++"
    assert operations.install(["g++"]) == ["g++"], "without apt-get nothing is installed"
