"""Small things that several test files of the outbox say."""

import sqlite3
from pathlib import Path
from typing import Any

from outbox.database import SQLiteStore
from outbox.models import OrderCreate, OutboxEvent

ORDER = OrderCreate.model_validate({"customer_email": "ada@example.com", "amount": "149.90"})


def rows(db_path: Path, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """What another connection sees: only what was committed."""
    connection = sqlite3.connect(db_path, isolation_level=None)
    try:
        return connection.execute(sql, values).fetchall()
    finally:
        connection.close()


async def add_event(store: SQLiteStore, aggregate_id: str = "aggregate-1", **payload: Any) -> OutboxEvent:
    async with store.transaction() as conn:
        return await store.add_event(conn, event_type="test.happened", aggregate_id=aggregate_id, payload=payload)
