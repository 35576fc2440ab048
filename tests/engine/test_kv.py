from uuid import UUID

import pytest

from engine.kv import BlockPool, KVManager

A, B = (UUID(int=1), 0), (UUID(int=2), 0)


def test_a_pool_gives_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.take(4) is None
    assert pool.free == 3
    taken = pool.take(3)
    assert taken is not None
    assert sorted(taken) == [0, 1, 2]
    assert pool.take(1) is None
    pool.give_back(taken)
    assert pool.free == 3


def test_a_table_grows_by_whole_blocks_and_only_when_rows_need_them() -> None:
    kv = KVManager(num_blocks=4, block_size=4)
    assert len(kv.reserve(A, 1, 0) or []) == 1
    assert len(kv.reserve(A, 4, 0) or []) == 1
    assert len(kv.reserve(A, 5, 0) or []) == 2
    assert len(kv.reserve(A, 2, 0) or []) == 2
    assert kv.free == 2


def test_no_room_changes_nothing() -> None:
    kv = KVManager(num_blocks=4, block_size=4)
    held = list(kv.reserve(A, 8, 0) or [])
    assert kv.reserve(A, 17, 5) is None
    assert kv.reserve(B, 9, 5) is None
    assert kv.reserve(A, 8, 5) == held
    assert (kv.free, kv.held(B)) == (2, 0)
    kv.check_integrity({A})


def test_block_seconds_are_the_area_under_the_number_of_held_blocks() -> None:
    kv = KVManager(num_blocks=4, block_size=4)
    kv.reserve(A, 1, 100)
    kv.reserve(A, 9, 150)  # 3 blocks from here
    kv.reserve(A, 10, 170)
    assert kv.release(A, 200) == 1 * 50 + 3 * 50
    assert kv.release(A, 300) == 0


def test_integrity_names_a_lost_block_and_one_in_two_places() -> None:
    kv = KVManager(num_blocks=4, block_size=4)
    blocks = kv.reserve(A, 8, 0)
    assert blocks is not None
    lost = blocks.pop()
    with pytest.raises(AssertionError, match=rf"lost \[{lost}\]"):
        kv.check_integrity({A})
    blocks += [lost, lost]
    with pytest.raises(AssertionError, match=rf"in two places \[{lost}\]"):
        kv.check_integrity({A})


def test_integrity_finds_a_table_that_outlived_its_sequence() -> None:
    kv = KVManager(num_blocks=4, block_size=4)
    kv.reserve(A, 8, 0)
    with pytest.raises(AssertionError, match="1 tables without sequence"):
        kv.check_integrity(set())
