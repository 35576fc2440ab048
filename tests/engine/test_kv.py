import random
from uuid import UUID

import pytest

from engine.kv import BlockPool, Chain, KVManager
from engine.kv.prefix import reusable_blocks

A, B, C = ((UUID(int=number), 0) for number in (1, 2, 3))
TOKENS = list(range(100, 116))  # four blocks of four


def computed(kv: KVManager, key, tokens: list[int], *, salt: str = "", now_ns: int = 0) -> list[int]:
    """A sequence takes up what is there and computes the rest. Returns its table."""
    chain = Chain(salt)
    prefix = kv.find(chain, tokens)
    assert kv.reserve(key, len(tokens), now_ns, prefix=prefix) is not None
    kv.publish(key, chain, tokens, len(tokens))
    return list(kv.reserve(key, len(tokens), now_ns) or [])


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


def test_integrity_names_a_lost_block_one_in_two_places_and_one_held_more_often_than_counted() -> None:
    kv = KVManager(num_blocks=4, block_size=4)
    blocks = kv.reserve(A, 8, 0)
    assert blocks is not None
    lost = blocks.pop()
    with pytest.raises(AssertionError, match=rf"lost \[{lost}\]"):
        kv.check_integrity({A})
    blocks += [lost, lost]
    with pytest.raises(AssertionError, match=rf"miscounted \[{lost}\]"):
        kv.check_integrity({A})
    blocks[-1] = 3
    with pytest.raises(AssertionError, match=r"in two places \[3\]"):
        kv.check_integrity({A})


def test_integrity_finds_a_table_that_outlived_its_sequence() -> None:
    kv = KVManager(num_blocks=4, block_size=4)
    kv.reserve(A, 8, 0)
    with pytest.raises(AssertionError, match="1 tables without sequence"):
        kv.check_integrity(set())


def test_a_later_sequence_takes_up_whole_blocks_from_the_head_until_the_first_that_differs() -> None:
    kv = KVManager(num_blocks=16, block_size=4)
    table = computed(kv, A, TOKENS)
    for same, blocks in ((3, 0), (4, 1), (7, 1), (8, 2), (12, 3), (15, 3)):
        assert kv.find(Chain(""), TOKENS[:same] + [1] * (20 - same)) == table[:blocks]
    assert kv.find(Chain(""), [1, *TOKENS]) == kv.find(Chain(""), TOKENS[4:] + TOKENS) == []


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_at_least_one_token_is_always_computed(tokens: int, blocks: int) -> None:
    assert reusable_blocks(tokens, 4) == blocks
    kv = KVManager(num_blocks=16, block_size=4)
    computed(kv, A, TOKENS)
    assert len(kv.find(Chain(""), TOKENS[:tokens])) == blocks


def test_another_salt_finds_nothing() -> None:
    kv = KVManager(num_blocks=16, block_size=4)
    computed(kv, A, TOKENS, salt="tenant:a")
    assert kv.find(Chain("tenant:b"), TOKENS) == []
    assert len(kv.find(Chain("tenant:a"), TOKENS)) == 3


def test_what_nobody_has_computed_yet_cannot_be_found() -> None:
    kv, chain = KVManager(num_blocks=16, block_size=4), Chain("")
    kv.reserve(A, 16, 0)
    assert kv.find(Chain(""), TOKENS) == []
    kv.publish(A, chain, TOKENS, 7)
    assert len(kv.find(Chain(""), TOKENS)) == 1
    kv.publish(A, chain, TOKENS, 16)
    assert len(kv.find(Chain(""), TOKENS)) == 3


def test_a_shared_block_is_free_when_its_last_holder_has_gone_and_counts_once_in_usage() -> None:
    kv = KVManager(num_blocks=8, block_size=4)
    first = computed(kv, A, TOKENS)
    second = computed(kv, B, [*TOKENS[:8], 1, 2])
    assert second[:2] == first[:2]
    assert (kv.free, kv.usage) == (3, 5 / 8)
    kv.release(A, 0)
    kv.check_integrity({B})
    assert kv.free == 5
    kv.release(B, 0)
    kv.check_integrity(set())
    assert kv.free == 8


def test_two_that_compute_the_same_at_once_end_up_with_one_copy() -> None:
    kv = KVManager(num_blocks=8, block_size=4)
    a, b = Chain(""), Chain("")
    kv.reserve(A, 8, 0)
    kv.reserve(B, 8, 0)
    kv.publish(A, a, TOKENS, 8)
    kv.publish(B, b, TOKENS, 8)
    assert kv.reserve(A, 8, 0) == kv.reserve(B, 8, 0)
    assert (kv.free, kv.cached) == (6, 2)
    kv.check_integrity({A, B})


def test_evicted_is_what_was_idle_for_longest_and_a_block_before_the_one_it_follows() -> None:
    kv = KVManager(num_blocks=8, block_size=4)
    old, new = TOKENS, [7, *TOKENS[1:]]
    computed(kv, A, old)
    kv.release(A, 0)
    computed(kv, B, new)
    kv.release(B, 0)
    assert (kv.free, kv.cached) == (8, 8)
    computed(kv, A, [*old[:8], 1])  # touches the head of the older one, and evicts its tail
    kv.release(A, 0)
    kept = []
    for taken in range(1, 9):
        kv.reserve(C, 4 * taken, 0)
        kv.check_integrity({C})
        kept.append((len(kv.find(Chain(""), [*old, 0])), len(kv.find(Chain(""), [*new, 0]))))
    assert kept == [(3, 4), (2, 4), (2, 3), (2, 2), (2, 1), (2, 0), (1, 0), (0, 0)]
    assert kv.reserve(C, 33, 0) is None


def test_room_counts_what_leaves_for_good_and_what_is_taken_up_only_once() -> None:
    kv = KVManager(num_blocks=8, block_size=4)
    computed(kv, A, TOKENS)
    computed(kv, B, TOKENS[:8] + [1] * 8)
    assert kv.free == 2
    prefix = kv.find(Chain(""), TOKENS)
    assert len(prefix) == 3
    assert kv.fits(20, prefix)
    assert not kv.fits(20, prefix, spare=1)
    assert kv.fits(20, prefix, spare=1, leaving=[A])  # its last block; the others are taken up or another's
    assert not kv.fits(20, prefix, spare=2, leaving=[A])
    assert kv.fits(20, prefix, spare=3, leaving=[A, B])
    assert not kv.fits(20, prefix, spare=4, leaving=[A, B])
    for key in (A, B):
        kv.release(key, 0)
    assert kv.fits(20, prefix, spare=3)
    assert not kv.fits(20, prefix, spare=4), "idle blocks that are taken up are no room"
    assert kv.reserve(C, 33, 0, prefix=prefix) is None
    kv.check_integrity(set())
    assert kv.free == 8


def test_without_caching_nothing_is_kept() -> None:
    kv = KVManager(num_blocks=8, block_size=4, caching=False)
    computed(kv, A, TOKENS)
    assert kv.find(Chain(""), TOKENS) == []
    kv.release(A, 0)
    assert (kv.free, kv.cached) == (8, 0)
    kv.check_integrity(set())


def test_integrity_finds_a_cached_block_whose_way_is_gone() -> None:
    kv = KVManager(num_blocks=8, block_size=4)
    table = computed(kv, A, TOKENS)
    pool = kv._pool
    link = pool._links.pop(table[1])
    del pool._named[link.name]
    with pytest.raises(AssertionError, match=rf"unreachable \[{table[2]}\]"):
        kv.check_integrity({A})


def test_any_order_of_arrivals_growth_and_departures_loses_no_block() -> None:
    """Against a plain statement of the cache: what is found was computed under that salt and agrees from the start."""
    noise = random.Random(5)
    kv = KVManager(num_blocks=40, block_size=4)
    chains: dict[tuple[UUID, int], tuple[Chain, str, list[int]]] = {}
    content: dict[int, tuple[str, tuple[int, ...]]] = {}  # by block: salt and all tokens up to its end
    hits = 0
    for number in range(10_000):
        action = noise.random()
        if action < 0.4 or not chains:
            salt, key = noise.choice("ab"), (UUID(int=number), 0)
            tokens = [noise.randrange(2) for _ in range(noise.randint(1, 20))]
            chain = Chain(salt)
            prefix = kv.find(chain, tokens)
            for place, block in enumerate(prefix):
                assert content[block] == (salt, tuple(tokens[: 4 * place + 4]))
            assert len(prefix) * 4 < len(tokens)
            hits += bool(prefix)
            if kv.reserve(key, len(tokens), number, prefix=prefix) is not None:
                chains[key] = chain, salt, tokens
        elif action < 0.7:
            key = noise.choice(list(chains))
            chain, salt, tokens = chains[key]
            tokens.append(noise.randrange(2))
            blocks = kv.reserve(key, len(tokens), number)
            if blocks is None:
                tokens.pop()
                continue
            done = noise.randint(0, len(tokens))
            kv.publish(key, chain, tokens, done)
            for place in range(done // 4):
                content[blocks[place]] = salt, tuple(tokens[: 4 * place + 4])
        else:
            key = noise.choice(list(chains))
            kv.release(key, number)
            del chains[key]
        kv.check_integrity(set(chains))
    assert hits > 500
