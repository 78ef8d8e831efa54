"""What is made and stands between two markers on a page of the documentation."""

from __future__ import annotations


def put_into(text: str, made: str, begin: str, end: str) -> str:
    """A page's text with this between its markers."""
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{made}\n\n{end}{tail}"
