"""Nobody types in a worker, and libraries that look for a person there find none."""

from __future__ import annotations

import pytest

from tests.kernel.kernel import Kernel

PROMPTS = "[name for name in ('ps1', 'ps2', 'ps3') if hasattr(sys, name)]"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["template", "fork"])
def test_workers_of_a_kernel_have_no_prompts(kernel: Kernel, method: str) -> None:
    said = kernel.run(
        f"""
        def prompts():
            return {PROMPTS}
        print(prompts()[:2], *notebook_launcher(prompts, (), 2, start_method={method!r}))
        """
    ).check()
    assert said.stdout.strip() == "['ps1', 'ps2'] [] []"


def test_live_workers_have_no_prompts(kernel: Kernel) -> None:
    said = kernel.run(
        f"""
        from nbaccel import Pool
        with Pool(2, namespace={{}}) as pool:
            pool.run("import sys; found = {PROMPTS}")
            print(pool.pull("found")["found"])
        """
    ).check()
    assert said.stdout.strip() == "[[], []]"
