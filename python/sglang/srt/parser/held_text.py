"""Text that arrives in pieces and must not be shown before it is known what it belongs to."""


def partial_suffix(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``marker``, but not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class TrimmedText:
    """Text without white space next to a boundary, which is dropped: the end's is held back until more text or a
    boundary follows."""

    def __init__(self) -> None:
        self._held = ""
        self._after_boundary = False

    def feed(self, text: str) -> str:
        """What may be shown now."""
        text = self._held + text
        if self._after_boundary:
            text = text.lstrip()
            self._after_boundary = not text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown

    def boundary(self) -> None:
        """Something that is not text stands here."""
        self._held = ""
        self._after_boundary = True

    def finish(self) -> str:
        """The end: what was held back."""
        held, self._held = self._held, ""
        return held
