"""Messages as bytes: a length (4 bytes, little-endian) and a msgpack body. And how long texts and payloads
may be.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

MAX_PAYLOAD = 256 << 20
"""What a user may send at once: the function and its config, the metrics of a report, a return value, a
broadcast. It is checked where the user hands it over, with an error that names what is too large.
"""
MAX_FRAME = MAX_PAYLOAD + (16 << 20)
"""With what goes around it: an environment, paths, a message inside another."""
MAX_TEXT = 1 << 18

_LENGTH = struct.Struct("<I")


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over a socket."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(
            f"a {type(message).__name__} message of {len(body)} bytes: at most {MAX_FRAME} are read"
        )
    return _LENGTH.pack(len(body)) + body


def described(error: BaseException) -> str:
    """An exception as a text that can be sent, whatever its class and its message are."""
    try:
        text = str(error)
    except Exception:  # the user's own class: the traceback says more
        text = "its message can't be shown, since its __str__ raises"
    return clip(f"{type(error).__name__}: {text}".strip())


def clip(text: str) -> str:
    """The beginning and the end of a text that may be of any length (an exception's message), and may have
    what isn't text in it (the name of a file).
    """
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def as_size(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def encode_odd(value: Any) -> Any:
    """NumPy scalars, and arrays and tensors without dimensions, are numbers; the rest is refused by name."""
    item = getattr(value, "item", None)
    if callable(item) and tuple(getattr(value, "shape", ())) == ():
        return item()
    raise TypeError(
        f"{type(value).__module__}.{type(value).__qualname__} is not a number, string, list or dict"
    )


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_odd)


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete now."""
        buffer = self._buffer
        buffer += data
        start = 0
        size = len(buffer)
        with memoryview(buffer) as view:
            bodies = []
            while size - start >= 4:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > MAX_FRAME:
                    raise ValueError(f"a frame of {length} bytes: this is not Everstep's protocol")
                if size - start - 4 < length:
                    break
                bodies.append(bytes(view[start + 4 : start + 4 + length]))
                start += 4 + length
        if start:
            del buffer[:start]
        return iter(bodies)
