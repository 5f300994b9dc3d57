"""What the tests of the outbox share: a database file, a clock that only the test advances, a consumer on HTTP."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outbox.config import AppConfig
from outbox.database import SQLiteStore
from outbox.mock_consumer import InMemoryIdempotencyStore, create_app, serve


class FakeClock:
    """Stands still until the test advances it."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def db_path(tmp_path: Path) -> Path:
    return tmp_path / "outbox.db"


@pytest.fixture
async def store(db_path: Path, clock: FakeClock) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(db_path, clock=clock) as store:
        yield store


@pytest.fixture
def idempotency_store() -> InMemoryIdempotencyStore:
    return InMemoryIdempotencyStore()


@pytest.fixture
async def consumer_url(idempotency_store: InMemoryIdempotencyStore) -> AsyncIterator[str]:
    """The mock consumer on a real server on a free loopback port."""
    async with serve(create_app(idempotency_store)) as url:
        yield f"{url}/webhooks"


@pytest.fixture
def config(consumer_url: str, db_path: Path) -> AppConfig:
    return AppConfig(db_path=db_path, consumer_endpoint=consumer_url, poll_interval=0.02)
