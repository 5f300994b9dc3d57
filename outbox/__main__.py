"""The command line for people who run an outbox: `python -m outbox COMMAND --database outbox.db`.

Data goes to standard output, as text or with --json as JSON; logs and errors go to standard error, an error as one line
with a non-zero exit status (2: the command was not understood, 1: it failed).
"""

import argparse
import asyncio
import json
import logging
import re
import signal
import sqlite3
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import httpx
from pydantic import ValidationError

from outbox.config import AppConfig, configure_logging
from outbox.database import SQLiteStore
from outbox.dispatcher import OutboxDispatcher
from outbox.http_client import create_client
from outbox.mock_consumer import create_app, serve
from outbox.models import DeadLetterRecord, EventStatus, OrderCreate
from outbox.store import OutboxStore

logger = logging.getLogger("outbox.command_line")

Command = Callable[[argparse.Namespace], Coroutine[Any, Any, None]]

DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
PAGE = 500


class CommandError(Exception):
    """What the user asked for cannot be done; the message is for them."""


# --- The commands --------------------------------------------------------------------------------------


async def init(arguments: argparse.Namespace) -> None:
    async with SQLiteStore(arguments.database):
        pass
    print(f"{arguments.database} is ready")


async def order(arguments: argparse.Namespace) -> None:
    order_create = OrderCreate.model_validate({"customer_email": arguments.email, "amount": arguments.amount})
    async with open_store(arguments) as store:
        placed, event = await store.create_order_with_outbox_event(order_create)
    if arguments.json:
        print_json({"order": placed.model_dump(mode="json"), "event": event.model_dump(mode="json")})
    else:
        print(f"order {placed.id}\nevent {event.id}")


async def consumer(arguments: argparse.Namespace) -> None:
    async with serve(create_app(), arguments.port) as url:
        print(f"listening on {url}/webhooks", flush=True)
        await stop_signal()


async def dispatch(arguments: argparse.Namespace) -> None:
    config = dispatcher_config(arguments)
    async with (
        open_store(arguments, config.synchronous) as store,
        http_client(config, fast=arguments.fast) as client,
        OutboxDispatcher(config, store, client),
    ):
        await stop_signal()


async def stats(arguments: argparse.Namespace) -> None:
    async with open_store(arguments) as store:
        now = await store.stats()
    if arguments.json:
        print_json(now.model_dump(mode="json"))
        return
    for status in EventStatus:
        print(f"{status:<12} {now.counts[status]:>10}")
    age = now.oldest_pending_age_seconds
    print("oldest pending event:", "none" if age is None else f"{age:.1f} s")


async def dead_letters(arguments: argparse.Namespace) -> None:
    async with open_store(arguments) as store:
        records = [record async for record in every_dead_letter(store)]
    if arguments.json:
        print_json([record.model_dump(mode="json") for record in records])
        return
    for record in records:
        reason = " ".join(record.failure_reason.split())
        print(f"{record.quarantined_at:%Y-%m-%dT%H:%M:%SZ}  {record.original_event_id}  {reason}")


async def replay(arguments: argparse.Namespace) -> None:
    async with open_store(arguments) as store:
        # All of them first: a replayed event that fails again is a new dead letter, and not to be replayed for ever.
        waiting = [record.original_event_id async for record in every_dead_letter(store)]
        chosen: list[str] = waiting if arguments.all else list(dict.fromkeys(arguments.ids))
        if unknown := set(chosen) - set(waiting):
            raise CommandError(f"no dead letter for event {', '.join(sorted(unknown))}: nothing was replayed")
        replayed = [event for event in chosen if arguments.dry_run or await store.replay_dead_letter(event)]
    if arguments.json:
        print_json({"replayed": replayed, "dry_run": arguments.dry_run})
    else:
        print(f"{'would replay' if arguments.dry_run else 'replayed'} {len(replayed)}")
        print(*replayed, sep="\n", end="\n" if replayed else "")


async def purge(arguments: argparse.Namespace) -> None:
    async with open_store(arguments) as store:
        deleted = await store.purge_published(arguments.older_than)
    if arguments.json:
        print_json({"purged": deleted})
    else:
        print(f"purged {deleted}")


# --- What they share -----------------------------------------------------------------------------------


@asynccontextmanager
async def open_store(
    arguments: argparse.Namespace, synchronous: Literal["NORMAL", "FULL"] = "NORMAL"
) -> AsyncGenerator[SQLiteStore, None]:
    refuse_to_create(arguments.database)
    async with SQLiteStore(arguments.database, synchronous=synchronous) as store:
        yield store


def refuse_to_create(database: Path) -> None:
    """A mistyped name must not leave an empty database behind, and look like an outbox without events."""
    if not database.exists():
        raise CommandError(f"{database} does not exist (to create it: python -m outbox init --database {database})")


async def every_dead_letter(store: OutboxStore) -> AsyncGenerator[DeadLetterRecord, None]:
    page = await store.list_dead_letters(PAGE)
    while page:
        for record in page:
            yield record
        page = await store.list_dead_letters(PAGE, after=page[-1].id)


def dispatcher_config(arguments: argparse.Namespace) -> AppConfig:
    given = {name: value for name in DISPATCH_SETTINGS if (value := getattr(arguments, name)) is not None}
    if "permanent_failure_statuses" in given:
        given["permanent_failure_statuses"] = given["permanent_failure_statuses"].split(",")
    return AppConfig(db_path=arguments.database, **given)


@asynccontextmanager
async def http_client(config: AppConfig, fast: bool) -> AsyncGenerator[httpx.AsyncClient, None]:
    if fast:
        try:
            from outbox.fast import create_fast_client
        except ImportError as error:
            raise CommandError(f"--fast needs the extra: pip install 'async-outbox-breaker[fast]' ({error})") from error
        client = create_fast_client(config.max_in_flight)
    else:
        client = create_client()
    async with client:
        yield client


async def stop_signal() -> None:
    """Return at the first SIGTERM or Ctrl-C; the second cancels this task."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    asked = asyncio.Event()

    def on_signal() -> None:
        if not asked.is_set():
            logger.info("Stopping, when what is under way is finished; a second signal does not wait for it.")
            asked.set()
        elif task is not None:
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, on_signal)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda _number, _frame: loop.call_soon_threadsafe(on_signal))
    await asked.wait()


def print_json(data: object) -> None:
    print(json.dumps(data, ensure_ascii=False))


# --- The arguments -------------------------------------------------------------------------------------

DISPATCH_SETTINGS = [name for name in AppConfig.model_fields if name != "db_path"]


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def duration(text: str) -> timedelta:
    match = DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time span, as 30s, 15m, 12h or 7d are")
    return timedelta(seconds=float(match[1]) * SECONDS[match[2]])


def port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 <= int(text[:6]) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, as 0 to 65535 are")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m outbox", description="A transactional outbox on SQLite.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    database = OneLineParser(add_help=False)
    database.add_argument(
        "--database", "--db", type=Path, default=Path("outbox.db"), help="the SQLite file (default: %(default)s)"
    )
    as_json = OneLineParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print JSON")

    def command(run: Command, summary: str, *parents: OneLineParser) -> OneLineParser:
        name = run.__name__.replace("_", "-")
        added = commands.add_parser(name, help=summary, description=summary, parents=parents)
        added.set_defaults(run=run)
        return added

    command(init, "Create the database, or what is missing of it.", database)

    placing = command(order, "Place an order, with its event.", database, as_json)
    placing.add_argument("--email", required=True, help="the customer's address")
    placing.add_argument("--amount", required=True, help="a decimal number, kept exactly")

    consuming = command(consumer, "Run the mock consumer until SIGTERM or Ctrl-C.")
    consuming.add_argument("--port", type=port, default=8000, help="0: any free one (default: %(default)s)")

    dispatching = command(dispatch, "Deliver until SIGTERM or Ctrl-C; finishes what is under way.", database)
    for name in DISPATCH_SETTINGS:
        field = AppConfig.model_fields[name]
        option = "--endpoint" if name == "consumer_endpoint" else "--" + name.replace("_", "-")
        if field.annotation is bool:
            dispatching.add_argument(option, dest=name, action="store_true", default=None, help=field.description)
        else:
            default = str(field.default).removeprefix("frozenset({").removesuffix("})")
            note = "" if field.is_required() else f" (default: {default})"
            dispatching.add_argument(
                option, dest=name, required=field.is_required(), metavar="X", help=f"{field.description}{note}"
            )
    dispatching.add_argument("--fast", action="store_true", help="aiohttp's transport (extra 'fast')")

    command(stats, "Count the events per state.", database, as_json)
    command(dead_letters, "List the dead letters, oldest first; with --json one object a line.", database, as_json)

    replaying = command(replay, "Send dead letters on their way again.", database, as_json)
    which = replaying.add_mutually_exclusive_group(required=True)
    which.add_argument("ids", nargs="*", default=[], metavar="ID", help="the id of a dead letter's event")
    which.add_argument("--all", action="store_true", help="all of them")
    replaying.add_argument("--dry-run", action="store_true", help="only say which")

    purging = command(purge, "Delete published events; their idempotency keys are forgotten.", database, as_json)
    purging.add_argument("--older-than", type=duration, required=True, metavar="SPAN", help="30s, 15m, 12h, 7d")
    return parser


def main() -> int:
    arguments = build_parser().parse_args()
    configure_logging()
    try:
        asyncio.run(arguments.run(arguments))
    except ValidationError as error:
        return failed("; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors()))
    except (CommandError, OSError, sqlite3.Error, ValueError) as error:
        return failed(str(error) or type(error).__name__)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return failed("interrupted")
    return 0


def failed(message: str) -> int:
    print(f"outbox: {' '.join(message.replace('Value error, ', '').split())}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
