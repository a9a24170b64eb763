"""What a server takes of its clients."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Limits of a server. Each is refused in one line with its status, and none of them cuts a text or an answer."""

    input_tokens: int
    """Most tokens of a text, with its prefix and EOS."""
    new_tokens: int = 512
    """Most tokens that a request may ask for."""
    body_bytes: int = 1 << 20
    texts: int = 64
    """Most texts of a request."""
    beams: int = 8
    batch_sequences: int = 32
    """Most sequences decoded at once: a text takes as many as it has beams."""
    waiting_texts: int = 256
    """Most texts that wait, of all requests together."""
    read_seconds: float = 10.0
    """From the first byte of a request, or the connection, to the last byte of the request."""
    answer_seconds: float = 60.0
    """From the last byte of a request to its answer."""
