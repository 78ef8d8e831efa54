"""What jsonschema imports for seconds, and Ray imports with it."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest

from nbaccel.hosts.ray_host import OWN_PATH
from tests.programs import run_program

pytestmark = pytest.mark.skipif(
    find_spec("lark") is None, reason="rfc3987-syntax is not installed, which needs lark"
)


def said(code: str, **variables: str) -> str:
    return run_program([sys.executable, "-c", code], env=os.environ | variables).stdout


def test_rays_own_processes_do_without():
    code = "import sys, ray; print('lark' in sys.modules, sys.modules['jsonschema'].__file__)"
    assert said(code, PYTHONPATH=OWN_PATH) == f"False {OWN_PATH}/jsonschema.py\n"


def test_the_notebook_has_it_when_it_is_used():
    code = """
import sys
from nbaccel.hosts.own_cluster import _rfc3987_syntax_later
with _rfc3987_syntax_later():
    import jsonschema
print("lark" in sys.modules, "rfc3987_syntax" in sys.modules)
conforms = jsonschema.FormatChecker().conforms
print(conforms("http://b\u00fccher.de/", "iri"), conforms("no iri", "iri"), "lark" in sys.modules)
"""
    assert said(code) == "False False\nTrue False True\n"
