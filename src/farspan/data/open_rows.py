"""Rows with free space, and the one into which a piece goes: best fit or first fit."""


class BestFit:
    """Places each piece into the row with the least free space that suffices, else a new one.

    The amounts of free space in use are a set of bits, cut into blocks of about sqrt(seq_len)
    bits, with one more word that marks the blocks that are not empty: "the next amount from here
    up" is a shift and a lowest set bit in at most two words.

    Args:
      seq_len: Tokens a row.
    """

    def __init__(self, seq_len: int):
        self._seq_len = seq_len
        self._count = 0
        self._shift = (seq_len.bit_length() + 1) // 2
        self._blocks_in_use = 0
        self._blocks: dict[int, int] = {}
        self._rows: dict[int, list[int]] = {}

    def place(self, length: int) -> int:
        """Returns the row into which a piece of `length` tokens, 1 .. seq_len, goes."""
        free = self._least_free(length)
        if free is None:
            row, free = self._count, self._seq_len
            self._count += 1
        else:
            row = self._take(free)
        if free > length:
            self._put(row, free - length)
        return row

    def _put(self, row: int, free: int) -> None:
        self._rows.setdefault(free, []).append(row)
        block, bit = free >> self._shift, free & ((1 << self._shift) - 1)
        self._blocks[block] = self._blocks.get(block, 0) | 1 << bit
        self._blocks_in_use |= 1 << block

    def _take(self, free: int) -> int:
        rows = self._rows[free]
        row = rows.pop()
        if not rows:
            self._forget(free)
        return row

    def _least_free(self, length: int) -> int | None:
        block, bit = length >> self._shift, length & ((1 << self._shift) - 1)
        same_block = self._blocks.get(block, 0) >> bit
        if same_block:
            return length + _lowest_bit(same_block)
        higher = self._blocks_in_use >> (block + 1)
        if not higher:
            return None
        block += 1 + _lowest_bit(higher)
        return (block << self._shift) + _lowest_bit(self._blocks[block])

    def _forget(self, free: int) -> None:
        del self._rows[free]
        block, bit = free >> self._shift, free & ((1 << self._shift) - 1)
        self._blocks[block] &= ~(1 << bit)
        if not self._blocks[block]:
            del self._blocks[block]
            self._blocks_in_use &= ~(1 << block)


class FirstFit:
    """Places each piece into the first row that has space for it, else a new one.

    A complete binary tree over the rows holds in each node the most free space below it. A row
    not yet used has all of its space free, so "a new row" is the first that fits as well.

    Args:
      seq_len: Tokens a row.
    """

    def __init__(self, seq_len: int):
        self._seq_len = seq_len
        self._leaves = 1
        self._tree = [0, seq_len]  # node n has the children 2n and 2n + 1

    def place(self, length: int) -> int:
        """Returns the row into which a piece of `length` tokens, 1 .. seq_len, goes."""
        if self._tree[1] < length:
            self._grow()
        tree, node = self._tree, 1
        while node < self._leaves:
            node *= 2
            if tree[node] < length:
                node += 1
        row = node - self._leaves
        tree[node] -= length
        while node > 1:
            node //= 2
            most = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == most:
                break
            tree[node] = most
        return row

    def _grow(self) -> None:
        """Doubles the rows: the tree so far becomes the left child of a new root."""
        old, width = self._tree, 1
        tree = [0, self._seq_len]
        while width <= self._leaves:
            tree += old[width : 2 * width] + [self._seq_len] * width
            width *= 2
        self._tree, self._leaves = tree, 2 * self._leaves


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1
