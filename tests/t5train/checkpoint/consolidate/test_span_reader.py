"""The CRC-32 of concatenated bytes."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from t5train.checkpoint.consolidate import span_reader


@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_the_crc_32_of_concatenated_bytes_is_computed_from_those_of_the_parts(first: bytes, second: bytes) -> None:
    assert span_reader.joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_the_crc_32_of_long_concatenated_bytes_is_computed_from_those_of_the_parts() -> None:
    first, second = b"abc" * 7, bytes(3_000_001)
    assert span_reader.joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
