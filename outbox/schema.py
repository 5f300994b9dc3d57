"""The tables, and the rules that the database itself enforces: legal status changes, and whose turn it is.

Article: Section 1 (the four states), Section 4.1 and 4.3 (the tables). The article's columns keep their names; crash
safety and order add `aggregate_id`, `sequence`, `is_head`, `next_attempt_at`, `lease_token` and `lease_expires_at`.
"""

import sqlite3

from outbox.models import LEGAL_STATUS_CHANGES, DeadLetterRecord, OutboxEvent

_LEGAL = ", ".join(sorted(f"'{old}->{new}'" for old, new in LEGAL_STATUS_CHANGES))

TABLES = (
    """
    CREATE TABLE IF NOT EXISTS orders (
        id TEXT PRIMARY KEY NOT NULL,
        customer_email TEXT NOT NULL,
        amount TEXT NOT NULL,          -- a decimal text: a REAL would round the cents
        status TEXT NOT NULL,
        created_at TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS outbox (
        sequence INTEGER PRIMARY KEY AUTOINCREMENT,   -- commit order; never given twice, also after a purge
        id TEXT NOT NULL UNIQUE,
        event_type TEXT NOT NULL,
        aggregate_id TEXT NOT NULL DEFAULT (lower(hex(randomblob(16)))),
        payload_json TEXT NOT NULL,
        idempotency_key TEXT NOT NULL UNIQUE,
        status TEXT NOT NULL DEFAULT 'PENDING'
            CHECK (status IN ('PENDING', 'PROCESSING', 'PUBLISHED', 'DEAD_LETTER')),
        is_head INTEGER NOT NULL DEFAULT 0,           -- 1: its aggregate's turn; kept by the triggers below
        retry_count INTEGER NOT NULL DEFAULT 0,
        next_attempt_at TEXT NOT NULL DEFAULT '',     -- '' sorts before every moment: due at once
        last_error TEXT,
        lease_token TEXT,
        lease_expires_at TEXT,
        created_at TEXT NOT NULL,
        updated_at TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS dead_letter_queue (
        id TEXT PRIMARY KEY NOT NULL,
        original_event_id TEXT NOT NULL UNIQUE REFERENCES outbox (id),
        payload_json TEXT NOT NULL,
        failure_reason TEXT NOT NULL,
        quarantined_at TEXT NOT NULL
    )
    """,
)

# The index that a claim reads holds only rows that it could take, so neither history nor a backlog makes it slower.
INDEXES = (
    """
    CREATE INDEX IF NOT EXISTS outbox_ready ON outbox (next_attempt_at, sequence)
    WHERE status = 'PENDING' AND is_head = 1
    """,
    "CREATE INDEX IF NOT EXISTS outbox_leases ON outbox (lease_expires_at) WHERE status = 'PROCESSING'",
    # One event of an aggregate at a time, across all dispatchers.
    "CREATE UNIQUE INDEX IF NOT EXISTS outbox_head ON outbox (aggregate_id) WHERE is_head = 1",
    """
    CREATE INDEX IF NOT EXISTS outbox_line ON outbox (aggregate_id, sequence)
    WHERE status IN ('PENDING', 'PROCESSING')
    """,
    "CREATE INDEX IF NOT EXISTS outbox_pending ON outbox (sequence) WHERE status = 'PENDING'",
    "CREATE INDEX IF NOT EXISTS outbox_published ON outbox (updated_at) WHERE status = 'PUBLISHED'",
)

_PROMOTE_NEXT_IN_LINE = """
    UPDATE outbox SET is_head = 1 WHERE sequence = (
        SELECT min(sequence) FROM outbox
        WHERE aggregate_id = OLD.aggregate_id AND status IN ('PENDING', 'PROCESSING')
    )
"""
_BECOME_HEAD_OF_AN_EMPTY_LINE = """
    UPDATE outbox SET is_head = 1 WHERE sequence = NEW.sequence AND NOT EXISTS (
        SELECT 1 FROM outbox WHERE aggregate_id = NEW.aggregate_id AND is_head = 1
    )
"""

TRIGGERS = (
    f"""
    CREATE TRIGGER IF NOT EXISTS outbox_status_change BEFORE UPDATE OF status ON outbox
    WHEN OLD.status || '->' || NEW.status NOT IN ({_LEGAL})
    BEGIN SELECT RAISE(ABORT, 'illegal outbox status change'); END
    """,
    f"""
    CREATE TRIGGER IF NOT EXISTS outbox_line_joined AFTER INSERT ON outbox
    WHEN NEW.status IN ('PENDING', 'PROCESSING') AND NEW.is_head = 0
    BEGIN {_BECOME_HEAD_OF_AN_EMPTY_LINE}; END
    """,
    f"""
    CREATE TRIGGER IF NOT EXISTS outbox_line_rejoined AFTER UPDATE OF status ON outbox
    WHEN OLD.status = 'DEAD_LETTER'
    BEGIN {_BECOME_HEAD_OF_AN_EMPTY_LINE}; END
    """,
    f"""
    CREATE TRIGGER IF NOT EXISTS outbox_line_left AFTER UPDATE OF status ON outbox
    WHEN NEW.status IN ('PUBLISHED', 'DEAD_LETTER')
    BEGIN
        UPDATE outbox SET is_head = 0 WHERE sequence = OLD.sequence;
        {_PROMOTE_NEXT_IN_LINE};
    END
    """,
    f"""
    CREATE TRIGGER IF NOT EXISTS outbox_line_deleted AFTER DELETE ON outbox
    WHEN OLD.is_head = 1
    BEGIN {_PROMOTE_NEXT_IN_LINE}; END
    """,
)


def create_schema(connection: sqlite3.Connection) -> None:
    """Create what is missing; safe to run again. Where nothing is missing it only reads.

    Raises `sqlite3.OperationalError` when SQLite is too old, or when a table `outbox` or `dead_letter_queue` of
    another kind is in the way.
    """
    if sqlite3.sqlite_version_info < (3, 35):
        raise sqlite3.OperationalError(f"SQLite 3.35 or newer is needed (RETURNING), this is {sqlite3.sqlite_version}")
    for statement in TABLES:
        connection.execute(statement)
    for table, record in (("outbox", OutboxEvent), ("dead_letter_queue", DeadLetterRecord)):
        try:
            connection.execute(f"SELECT {', '.join(record.model_fields)} FROM {table} LIMIT 0")
        except sqlite3.OperationalError as error:
            raise sqlite3.OperationalError(f"the table {table} is of another kind: {error}") from error
    for statement in (*INDEXES, *TRIGGERS):
        connection.execute(statement)
