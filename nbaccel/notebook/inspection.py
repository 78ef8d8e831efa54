"""`name?` and the tooltip for names that live in workers only."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from IPython.core import page

from nbaccel.notebook.session import Session

__all__ = ["Inspection"]


class Inspection:
    """Asks the workers where the notebook's shell does not know a name."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names = ("object_inspect_mime", "_inspect")

    def load(self) -> None:
        """Stand in front of the shell's own methods."""
        shell = self._session.shell
        self._hide("object_inspect_mime", self._mime(shell.object_inspect_mime))
        self._hide("_inspect", self._shown(shell._inspect))  # noqa: SLF001 - behind `name?`

    def unload(self) -> None:
        """Step aside: the class's methods are found again."""
        for name in self._names:
            vars(self._session.shell).pop(name, None)

    def _hide(self, name: str, function: Callable[..., Any]) -> None:
        vars(self._session.shell)[name] = function

    def _mime(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def object_inspect_mime(oname: str, detail_level: int = 0, **more: Any) -> Any:
            try:
                return own(oname, detail_level, **more)
            except KeyError:
                found = self._ask(oname, detail_level)
                if found is None:
                    raise
                return found

        return object_inspect_mime

    def _shown(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def _inspect(meth: str, oname: str, namespaces: Any = None, **more: Any) -> Any:
            known = meth != "pinfo" or self._session.shell._object_find(oname, namespaces).found  # noqa: SLF001 - as `name?` asks
            found = None if known else self._ask(oname, int(more.get("detail_level", 0)))
            if found is None:
                return own(meth, oname, namespaces, **more)
            page.page(found)
            return None

        return _inspect

    def _ask(self, name: str, detail: int) -> dict[str, str] | None:
        pool = self._session.pool
        if pool is None or not self._session.is_live() or not name:
            return None
        found = pool.inspect(name, detail)
        if found is None:
            return None
        plain = found.get("text/plain", "")
        # A kernel takes the HTML away again, and must find some.
        return {"text/html": f"<pre>{html.escape(plain)}</pre>", **found, "text/plain": plain}
