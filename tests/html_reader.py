"""HTML, read as a browser reads it."""

from __future__ import annotations

from html.parser import HTMLParser


class Html(HTMLParser):
    """Its tags with their attributes, and its words; what is opened is closed, in order."""

    VOID = frozenset({"br", "circle", "img", "input", "meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def kinds(self) -> list[str]:
        return [tag for tag, _ in self.tags]

    @property
    def attributes(self) -> list[tuple[str, str | None]]:
        return [pair for _, attributes in self.tags for pair in attributes.items()]

    def of(self, css_class: str) -> list[dict[str, str | None]]:
        """The attributes of elements with a class."""
        return [a for _, a in self.tags if css_class in (a.get("class") or "").split()]
