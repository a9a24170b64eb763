"""CRC-32 of two runs of bytes end to end, from the CRC-32 of each.

As in zlib's ``crc32_combine``: a CRC-32 is the remainder of the bytes, read as a polynomial over GF(2), so that bytes
that follow multiply it by a power of x. Polynomials are integers whose highest bit is the coefficient of x^0.
"""

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def joined(first: int, second: int, second_size: int) -> int:
    """CRC-32 of bytes with the CRC-32 ``first``, followed by ``second_size`` bytes with the CRC-32 ``second``."""
    return _product(first, _shift(second_size)) ^ second


@lru_cache(maxsize=1 << 12)
def _shift(size: int) -> int:
    """X to the power of ``size`` bytes."""
    power, square = _ONE, _ONE >> 8
    while size:
        if size & 1:
            power = _product(power, square)
        square, size = _product(square, square), size >> 1
    return power


def _product(left: int, right: int) -> int:
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = left << 1 & 0xFFFFFFFF
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
