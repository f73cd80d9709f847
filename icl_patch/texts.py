"""Texts from users: files are UTF-8, and strings can be encoded as UTF-8."""

import codecs
from collections.abc import Iterator
from pathlib import Path

# The marks of UTF-32 come first: one begins with a mark of UTF-16.
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_SHOWN = 20  # characters before and behind one that is refused


def read_text(path: Path) -> str:
    r"""The text of a UTF-8 file, without a byte order mark; its lines end in ``\n``.

    Raises:
        ValueError: it is not UTF-8; the error names the first byte that is not, from 0.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    _check_mark(content, path)
    return _decode(content, path, 0).replace("\r\n", "\n").replace("\r", "\n")


def read_lines(path: Path) -> Iterator[str | ValueError]:
    """The lines of a UTF-8 file without byte order marks, one at a time in memory; in place of a
    line that is not UTF-8, the error of :func:`read_text`.

    Raises:
        ValueError: the file begins with the byte order mark of another encoding.
        OSError: it cannot be read.
    """
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if offset == 0:
                _check_mark(line, path)
            try:
                yield _decode(line, path, offset)
            except ValueError as error:
                yield error
            offset += len(line)


def check_text(text: object) -> None:
    """Raises TypeError for anything but text, and ValueError for a text that cannot be encoded as
    UTF-8: it has half of a surrogate pair, which Python puts in place of a byte that is not UTF-8,
    and which JSON can escape.
    """
    if not isinstance(text, str):
        raise TypeError(f"expected text, got {text!r:.40} ({type(text).__name__})")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at, code = error.start, ord(text[error.start])
        of_a_byte = 0xDC80 <= code <= 0xDCFF  # as Python decodes arguments of a command
        got = f"byte 0x{code - 0xDC00:02x}" if of_a_byte else f"the lone surrogate U+{code:04X}"
        around = text[max(at - _SHOWN, 0) : at + _SHOWN]
        raise ValueError(
            f"expected text that UTF-8 can encode, got {got} as character {at}, in {around!r}:"
            " leave it out, or read the text in its own encoding"
        ) from None


def check_path(path: object) -> None:
    """Raises ValueError for a path that is not UTF-8: safetensors opens no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"expected a path in UTF-8, which safetensors needs, got {str(path)!r}: rename it"
        ) from None


def _check_mark(content: bytes, path: Path) -> None:
    """Raises ValueError if a file begins with the byte order mark of another encoding."""
    for mark, encoding in _OTHER_MARKS.items():
        if content.startswith(mark):
            raise ValueError(
                f"expected UTF-8 text in {path}, got the byte order mark of {encoding} at 0:"
                f" convert it, as by iconv -f {encoding} -t UTF-8"
            )


def _decode(content: bytes, path: Path, offset: int) -> str:
    """A part of a file, from byte ``offset`` on, as text."""
    try:
        text = content.decode()
        bad = content.find(0)  # valid UTF-8, but no text has it, and UTF-16 has it everywhere
    except UnicodeDecodeError as error:
        bad = error.start
    if bad >= 0:
        cure = f"convert it, as by iconv -f {'UTF-16' if 0 in content else 'LATIN1'} -t UTF-8"
        if content[bad] == 0 and content.count(0) < len(content) / 4:
            cure = "take it out, no text has it"
        got = f"byte 0x{content[bad]:02x} at {offset + bad}"
        raise ValueError(f"expected UTF-8 text in {path}, got {got}: {cure}")
    return text.removeprefix("\ufeff")
