"""A block count as users write it.

Imports next to nothing, so that the command that only reads the count can start fast.
"""

from reblock.errors import InvalidBlockCount, shown

__all__ = ["MAX_NUM_BLOCKS", "parse_block_count"]

# Block tables are 32-bit.
MAX_NUM_BLOCKS = 2**31 - 1


def parse_block_count(value: object) -> int:
    """Return a block count that a user wrote, as an int or as text in ASCII digits.

    Raises:
        InvalidBlockCount: It is no whole number from 1 to `MAX_NUM_BLOCKS`.

    >>> parse_block_count("128")
    128
    """
    count = value
    # The length is bounded, because int() is slow on endless digits and refuses them at last.
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 64:
        count = int(value)
    if isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MAX_NUM_BLOCKS:
        return count
    raise InvalidBlockCount(
        f"kvcache_num_blocks={shown(value)} must be a whole number from 1 to {MAX_NUM_BLOCKS:,}",
        num_blocks=value,
    )
