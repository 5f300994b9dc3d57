"""Events of one aggregate are delivered in commit order, one at a time; other aggregates never wait for them."""

import asyncio
import random
from datetime import timedelta
from pathlib import Path

import pytest

from outbox.database import SQLiteStore
from outbox.models import OutboxEvent
from tests.outbox.conftest import FakeClock
from tests.outbox.support import add_event, rows

LEASE_SECONDS = 30.0


async def claim(store: SQLiteStore, limit: int = 100) -> list[OutboxEvent]:
    return await store.claim_batch(limit, LEASE_SECONDS)


async def line_up(store: SQLiteStore, aggregate_id: str, length: int = 3) -> list[OutboxEvent]:
    return [await add_event(store, aggregate_id, number=number) for number in range(length)]


async def test_one_event_of_an_aggregate_is_under_way_at_a_time_and_the_next_follows_when_it_is_published(
    store: SQLiteStore, db_path: Path, clock: FakeClock
) -> None:
    line = await line_up(store, "a")
    async with SQLiteStore(db_path, clock=clock) as other_dispatcher:
        for event in line:
            [claimed] = await claim(store)
            assert claimed.id == event.id
            assert await claim(store) == []
            assert await claim(other_dispatcher) == []
            assert await store.mark_event_published(claimed)

    assert await claim(store) == []


async def test_a_claim_takes_the_first_of_each_aggregate_oldest_first(store: SQLiteStore) -> None:
    for number in range(3):
        for aggregate in ("a", "b", "c"):
            await add_event(store, aggregate, number=number)

    assert [(event.aggregate_id, event.sequence) for event in await claim(store)] == [("a", 1), ("b", 2), ("c", 3)]


async def test_a_retried_event_keeps_its_aggregate_in_order_and_no_other_aggregate_waits(
    store: SQLiteStore, clock: FakeClock
) -> None:
    line = await line_up(store, "a")
    [first] = await claim(store)
    await store.record_event_failure_or_quarantine(first, "HTTP 500", 3, 60.0)
    other = await add_event(store, "b")

    [not_waiting] = await claim(store)
    assert not_waiting.id == other.id
    assert await store.mark_event_published(not_waiting)
    clock.advance(60.0)
    delivered: list[str] = []
    for _ in line:
        [event] = await claim(store, 1)
        delivered.append(event.id)
        assert await store.mark_event_published(event)
    assert delivered == [event.id for event in line]


async def test_a_released_event_keeps_its_place(store: SQLiteStore) -> None:
    line = await line_up(store, "a")
    [first] = await claim(store)
    await store.release(first, 0.0)

    [again] = await claim(store)

    assert again.id == line[0].id


async def test_an_expired_lease_keeps_its_place(store: SQLiteStore, clock: FakeClock) -> None:
    line = await line_up(store, "a")
    await claim(store)
    clock.advance(LEASE_SECONDS)

    [again] = await claim(store)

    assert again.id == line[0].id


async def test_a_dead_letter_does_not_hold_its_aggregate_back(store: SQLiteStore) -> None:
    line = await line_up(store, "a")
    [first] = await claim(store)
    await store.record_event_failure_or_quarantine(first, "HTTP 400", 3, None)

    [second] = await claim(store)

    assert second.id == line[1].id


async def test_a_replayed_event_is_never_beside_one_in_flight(store: SQLiteStore) -> None:
    first, second, third = await line_up(store, "a")
    [event] = await claim(store)
    await store.record_event_failure_or_quarantine(event, "HTTP 400", 3, None)
    [in_flight] = await claim(store)
    assert in_flight.id == second.id

    assert await store.replay_dead_letter(first.id) is True
    assert await claim(store) == []

    await store.mark_event_published(in_flight)
    [replayed] = await claim(store)
    assert replayed.id == first.id  # ahead of the third, which came later
    await store.mark_event_published(replayed)
    assert [event.id for event in await claim(store)] == [third.id]


async def test_an_event_replayed_into_an_empty_line_is_due_at_once_and_holds_back_what_comes_later(
    store: SQLiteStore,
) -> None:
    [first] = await line_up(store, "a", 1)
    [event] = await claim(store)
    await store.record_event_failure_or_quarantine(event, "HTTP 400", 3, None)
    await store.replay_dead_letter(first.id)
    await add_event(store, "a", number="later")

    assert [event.id for event in await claim(store)] == [first.id]


async def test_events_of_one_transaction_are_delivered_in_the_order_they_were_added(store: SQLiteStore) -> None:
    async with store.transaction() as conn:
        for number in range(5):
            await store.add_event(conn, event_type="t", aggregate_id="a", payload={"number": number})

    delivered = []
    for _ in range(5):
        [event] = await claim(store)
        delivered.append(event.sequence)
        await store.mark_event_published(event)
    assert delivered == sorted(delivered)


async def test_a_rolled_back_event_leaves_no_gap_that_anybody_waits_for(store: SQLiteStore) -> None:
    with pytest.raises(ZeroDivisionError):
        await roll_back(store)
    await add_event(store, "a", number=2)

    assert len(await claim(store)) == 1


async def roll_back(store: SQLiteStore) -> None:
    async with store.transaction() as conn:
        await store.add_event(conn, event_type="t", aggregate_id="a", payload={"number": 1})
        raise ZeroDivisionError


async def test_purging_and_deleting_never_give_a_sequence_twice_and_never_leave_a_line_without_a_head(
    store: SQLiteStore, db_path: Path
) -> None:
    line = await line_up(store, "a")
    rows(db_path, "DELETE FROM outbox WHERE id = ?", line[0].id)
    [second] = await claim(store)
    assert second.id == line[1].id

    rows(db_path, "DELETE FROM outbox")
    [again] = await line_up(store, "a", 1)
    assert again.sequence > line[-1].sequence
    assert len(await claim(store)) == 1


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_becomes_of_each_event_its_aggregate_stays_in_order_and_each_line_has_one_head(
    store: SQLiteStore, db_path: Path, clock: FakeClock, seed: int
) -> None:
    chance = random.Random(seed)
    leased: list[OutboxEvent] = []
    added = 0
    for _ in range(250):
        match chance.randrange(9):
            case 0 | 1:
                await add_event(store, chance.choice("abc"), number=added)
                added += 1
            case 2 | 3:
                leased += await claim(store, chance.randrange(4))
            case 4 if leased:
                await store.mark_event_published(leased.pop(chance.randrange(len(leased))))
            case 5 if leased:
                event = leased.pop(chance.randrange(len(leased)))
                await store.record_event_failure_or_quarantine(event, "HTTP 500", 3, chance.choice([0.0, 5.0, None]))
            case 6 if leased:
                await store.release(leased.pop(chance.randrange(len(leased))), chance.choice([0.0, 5.0]))
            case 7:
                for dead_letter in (await store.list_dead_letters())[:1]:
                    await store.replay_dead_letter(dead_letter.original_event_id)
            case _:
                clock.advance(chance.choice([1.0, LEASE_SECONDS]))
                await store.purge_published(timedelta(minutes=1))
        assert_one_head_for_each_line(db_path)
    # At the end nothing is left behind: all of it can be claimed and published.
    clock.advance(3600.0)
    while events := await claim(store):
        for event in events:
            await store.mark_event_published(event)
    assert rows(db_path, "SELECT count(*) FROM outbox WHERE status IN ('PENDING', 'PROCESSING')") == [(0,)]


def assert_one_head_for_each_line(db_path: Path) -> None:
    lines = rows(
        db_path,
        """
        SELECT aggregate_id, sum(is_head), sum(status = 'PROCESSING'), sum(status = 'PROCESSING' AND NOT is_head)
        FROM outbox WHERE status IN ('PENDING', 'PROCESSING') GROUP BY aggregate_id
        """,
    )
    for _, heads, under_way, under_way_out_of_turn in lines:
        assert heads == 1
        assert under_way <= 1
        assert under_way_out_of_turn == 0
    assert rows(db_path, "SELECT 1 FROM outbox WHERE is_head AND status IN ('PUBLISHED', 'DEAD_LETTER')") == []


async def test_many_dispatchers_at_once_keep_each_aggregate_in_order(db_path: Path) -> None:
    delivered: dict[str, list[int]] = {}
    under_way: set[str] = set()

    async def deliver_all(store: SQLiteStore) -> None:
        while events := await claim(store, 2):
            for event in events:
                assert event.aggregate_id not in under_way
                under_way.add(event.aggregate_id)
            for event in events:
                await asyncio.sleep(0)
                delivered.setdefault(event.aggregate_id, []).append(event.sequence)
                under_way.remove(event.aggregate_id)
                await store.mark_event_published(event)

    async with SQLiteStore(db_path) as store, SQLiteStore(db_path) as other:
        for number in range(60):
            await add_event(store, f"aggregate-{number % 12}", number=number)
        await asyncio.gather(*(deliver_all(each) for each in (store, other) * 3))
        await deliver_all(store)

    assert sum(len(sequences) for sequences in delivered.values()) == 60
    assert all(sequences == sorted(sequences) for sequences in delivered.values())
