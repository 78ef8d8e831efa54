"""Get the browser that the tests look with, once.

    python -m tests.browser.chromium     # `make test` does this first; later calls do nothing

Debian's own Chromium, with one family of fonts. What cannot be installed is said, and the tests
that need it are skipped with this reason.
"""

from __future__ import annotations

import shutil
import sys

from tests import apt

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Without fonts, letters are boxes: a screenshot would show nothing of what a user sees.
PACKAGES = ["chromium", "fonts-dejavu-core"]


def path() -> str | None:
    """Where the browser is, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def main() -> int:
    if path():
        return 0
    print(f"installing {' and '.join(PACKAGES)} for the browser tests (once)", flush=True)
    if apt.install(PACKAGES) and path():
        return 0
    print(f"no browser tests without these packages: apt-get install {' '.join(PACKAGES)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
