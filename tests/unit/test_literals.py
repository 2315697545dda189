"""Literals come back as they were added, wherever the blocks in which they are template end."""

from __future__ import annotations

import pickle
import random
from itertools import pairwise

from paddle_reshard.pipeline.core.literals import BLOCK_BYTES, Literals


def _of_many_sizes() -> list[tuple[int, int, bytes]]:
    numbers = random.Random(0)
    sizes = [
        0,
        1,
        200,
        BLOCK_BYTES - 201,
        BLOCK_BYTES,
        3 * BLOCK_BYTES + 7,
        *(numbers.randrange(5_000) for _ in range(500)),
    ]
    return [(number % 3, 11 * number, numbers.randbytes(size)) for number, size in enumerate(sizes)]


def test_literals_come_back_as_they_were_added() -> None:
    given = _of_many_sizes()
    literals = Literals(given)
    assert list(literals) == given
    assert literals.sizes.tolist() == [len(content) for _, _, content in given]


def test_what_is_added_to_a_copy_is_not_in_the_original() -> None:
    given = _of_many_sizes()
    literals = Literals(given)
    more = literals.copy()
    for literal in given:
        more.add(*literal)
    assert list(literals) == given
    assert list(more) == given + given


def test_files_that_are_alike_share_their_contents() -> None:
    literals = Literals()
    template = literals.template([(0, b"head"), (100, b"tail")])
    literals.add_file(template, 3)
    literals.add_file(template, 1)
    assert list(literals) == [(3, 0, b"head"), (3, 100, b"tail"), (1, 0, b"head"), (1, 100, b"tail")]


def test_what_lies_in_ranges_of_files() -> None:
    """Of a file whose bytes are all literals, added from its end to its start, every range is its own bytes."""
    numbers = random.Random(2)
    whole = numbers.randbytes(3 * BLOCK_BYTES)
    cuts = sorted({0, len(whole), *(numbers.randrange(len(whole)) for _ in range(300))})
    pieces = [(7, start, whole[start:stop]) for start, stop in pairwise(cuts)]
    literals = Literals([(5, 0, b"another file"), *reversed(pieces)])
    ranges = [(7, *sorted(numbers.sample(range(len(whole)), 2))) for _ in range(20)]
    found = literals.by_file().of_ranges([(5, 3, 4), (6, 0, 9), *ranges])
    for taken in (list(found), pickle.loads(pickle.dumps(found))):
        assert taken[0] == (0, 0, b"t")
        contents = [bytearray(stop - start) for _, start, stop in ranges]
        for number, offset, content in taken[1:]:
            contents[number - 2][offset : offset + len(content)] = content
        assert contents == [whole[start:stop] for _, start, stop in ranges]
        assert len(taken) == len(found)
