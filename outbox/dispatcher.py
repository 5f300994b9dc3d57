"""The dispatcher: claims events, delivers them side by side, and settles each by what came of it.

Article: Section 4.2 (claim and post) and 4.3 (retry and quarantine).
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Self, cast

import httpx

from outbox.cancellation import ended, run_to_end
from outbox.config import AppConfig
from outbox.delivery import Delivery
from outbox.http_client import create_client
from outbox.models import EventStatus, OutboxEvent
from outbox.store import OutboxStore

logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.005
LONGEST_PAUSE_AFTER_A_FAULT_SECONDS = 1.0

CLAIM_FAULT = "The outbox cannot be read; trying again."
SETTLE_FAULT = "A delivery cannot be settled; trying again while its lease lasts."
RELEASE_FAULT = "A cancelled delivery cannot be released; its lease has to expire."

Outcome = EventStatus | None
"""What became of a claimed event. None: its lease was lost, or the database could not be told."""

Deliveries = dict[asyncio.Task[Outcome], OutboxEvent]


class OutboxDispatcher:
    """Delivers what is in `store` to `config.consumer_endpoint`, each event at least once (Section 4.2).

    `client` is used as it is and not closed; without one the dispatcher makes its own. Three ways to run it:
    `await dispatcher.process_batch()` for one round, `await dispatcher.run()` until `stop()`, and
    `async with dispatcher:` for as long as the block lasts.
    """

    def __init__(self, config: AppConfig, store: OutboxStore, client: httpx.AsyncClient | None = None) -> None:
        self._config = config
        self._store = store
        self._endpoint = httpx.URL(config.consumer_endpoint)
        self._pause_after_a_fault = min(config.poll_interval, LONGEST_PAUSE_AFTER_A_FAULT_SECONDS)
        self._client = client
        self._in_a_slot: set[asyncio.Task[Outcome]] = set()
        self._slots_reserved = 0
        self._wake = asyncio.Event()
        self._gathered = asyncio.Event()
        self._gathered.set()
        self._stop_requested = False
        self._stopped = asyncio.Event()
        self._stopped.set()
        self._task: asyncio.Task[None] | None = None
        self._faults: defaultdict[str, set[str]] = defaultdict(set)

    # --- three ways to run it ---

    async def process_batch(self) -> list[Outcome]:
        """Claim once, deliver what was claimed, and return what became of each event (PENDING: it is retried later).

        Raises what the store raises when the claim fails. Cancelled, it gives back what it had claimed, no attempt
        counted.
        """
        async with self._http_client() as client:
            try:
                deliveries = await self._start_deliveries(client)
            finally:
                self._wake.set()  # run() may have found every free slot reserved for this claim, and waits for one
            try:
                if deliveries:
                    await asyncio.wait(deliveries)
            finally:
                await run_to_end(self._give_back(deliveries))
            return [delivery.result() for delivery in deliveries]

    async def run(self) -> None:
        """Deliver until `stop()`, or until this task is cancelled; no fault of the database or a consumer ends it.

        Raises `RuntimeError` when it runs already.
        """
        if not self._stopped.is_set():
            raise RuntimeError("this dispatcher runs already")
        self._stopped.clear()
        under_way: Deliveries = {}
        try:
            async with self._http_client() as client:
                try:
                    while not self._stop_requested:
                        await self._run_one_round(client, under_way)
                    if under_way:
                        await asyncio.wait(under_way)
                finally:
                    await run_to_end(self._give_back(under_way))
        finally:
            self._stop_requested = False
            self._stopped.set()

    async def stop(self) -> None:
        """Claim nothing more; return when each delivery under way is settled, after `request_timeout` at the latest."""
        await asyncio.sleep(0)  # a run() whose task was created just before has begun when this returns
        if not self._stopped.is_set():
            self._stop_requested = True
            self._wake.set()
            await self._stopped.wait()

    async def __aenter__(self) -> Self:
        task = asyncio.create_task(self.run())
        try:
            await asyncio.sleep(0)  # it has begun when this returns, so it is known whether it runs already
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        if task.done():
            task.result()
        self._task = task
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            try:
                await self.stop()
            except asyncio.CancelledError:
                self._task.cancel()
                raise
            finally:
                await ended(self._task)
            self._task.result()

    # --- the loop ---

    async def _run_one_round(self, client: httpx.AsyncClient, under_way: Deliveries) -> None:
        """Claim and start deliveries, or wait until there may be something to claim."""
        self._wake.clear()
        try:
            started = await self._start_deliveries(client)
            if not started:
                await self._wait_for_work()
        except Exception as error:
            self._report(CLAIM_FAULT, error)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_after_a_fault):
                    await self._wake.wait()
            return
        self._report_recovery(CLAIM_FAULT)

        def settled(delivery: asyncio.Task[Outcome]) -> None:
            if not delivery.cancelled():  # the end of the event loop cancels it on its own: it is still to be released
                del under_way[delivery]

        for delivery, event in started.items():
            under_way[delivery] = event
            delivery.add_done_callback(settled)

    async def _start_deliveries(self, client: httpx.AsyncClient) -> Deliveries:
        """PENDING -> PROCESSING for as many events as there are free slots, so none that is claimed waits for one.

        If the process dies from here on, each lease expires and the event is claimed again.
        """
        limit = min(self._config.batch_size, self._free_slots())
        if limit <= 0:
            return {}
        lease_ends = asyncio.get_running_loop().time() + self._config.lease_seconds
        self._slots_reserved += limit
        try:
            events = await self._store.claim_batch(limit, self._config.lease_seconds)
        finally:
            self._slots_reserved -= limit
        deliveries: Deliveries = {}
        for event in events:
            delivery = asyncio.create_task(self._deliver(client, event, lease_ends))
            self._in_a_slot.add(delivery)
            delivery.add_done_callback(self._leave_slot)
            deliveries[delivery] = event
        return deliveries

    def _free_slots(self) -> int:
        return self._config.max_in_flight - len(self._in_a_slot) - self._slots_reserved

    def _leave_slot(self, delivery: asyncio.Task[Outcome]) -> None:
        self._in_a_slot.discard(delivery)
        self._wake.set()

    async def _wait_for_work(self) -> None:
        """Return at a commit of this process, a freed slot, `stop()`, or after `poll_interval` seconds."""
        if self._free_slots() <= 0:
            await self._wake.wait()
            return
        waits: list[asyncio.Task[object]] = [
            asyncio.create_task(self._wake.wait()),
            asyncio.create_task(self._store.wait_for_events(self._config.poll_interval)),
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        for wait in done:
            wait.result()

    # --- one event ---

    async def _deliver(self, client: httpx.AsyncClient, event: OutboxEvent, lease_ends: float) -> Outcome:
        """Send and settle. Cancelled before the answer's status has arrived, it leaves the event to `_give_back`."""
        slot = cast("asyncio.Task[Outcome]", asyncio.current_task())
        delivery = Delivery(self._config, self._endpoint, event)
        try:
            # Claimed with its attempts used up, the event may be what killed those who sent it: it is not sent again.
            if event.retry_count < self._config.max_delivery_attempts:
                await delivery.send(client)
            self._in_a_slot.discard(slot)
            await self._gather()
        except asyncio.CancelledError:
            if delivery.status_code is None:
                raise
        # Before it is settled: the claim that the free slot asks for then shares the commit of this settlement.
        self._leave_slot(slot)
        tries = 0
        while True:
            tries += 1
            try:
                outcome = await self._settle(event, delivery)
            except Exception as error:
                self._report(SETTLE_FAULT, error)
            else:
                if tries > 1:
                    self._report_recovery(SETTLE_FAULT)
                return outcome
            if self._stop_requested or slot.cancelling() or asyncio.get_running_loop().time() >= lease_ends:
                self._faults.pop(SETTLE_FAULT, None)  # given up: the next one is news again
                return None
            self._in_a_slot.add(slot)  # what cannot be settled slows the claims down
            with suppress(asyncio.CancelledError):  # then it is tried once more: what came of it is known
                await asyncio.sleep(self._pause_after_a_fault)

    async def _gather(self) -> None:
        """Wait a moment for other deliveries to end: what they settle, and the next claim, then share one commit."""
        if len(self._in_a_slot) < self._config.max_in_flight / 2:
            self._gathered.set()
        elif self._gathered.is_set():
            self._gathered = asyncio.Event()
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._gathered.set)
        await self._gathered.wait()

    async def _settle(self, event: OutboxEvent, delivery: Delivery) -> Outcome:
        """PROCESSING -> PUBLISHED, PENDING or DEAD_LETTER.

        If the process dies before this commits, the event is delivered again, with the same key.
        """
        if delivery.succeeded:
            if not await self._store.mark_event_published(event):
                self._log_lost_lease(event)
                return None
            logger.info(
                "Event delivered and marked PUBLISHED.",
                extra={
                    "event_id": event.id,
                    "status_code": delivery.status_code,
                    "retry_count": event.retry_count,
                },
            )
            return EventStatus.PUBLISHED

        retry_in = delivery.retry_in()
        result = await self._store.record_event_failure_or_quarantine(
            event, delivery.reason, self._config.max_delivery_attempts, retry_in
        )
        if result is None:
            self._log_lost_lease(event)
            return None
        status, retry_count, dead_letter = result
        if dead_letter is None:
            logger.warning(
                "Delivery failed; it is tried again after the backoff.",
                extra={
                    "event_id": event.id,
                    "retry_count": retry_count,
                    "backoff_seconds": retry_in,
                    "error": delivery.reason,
                },
            )
        else:
            logger.error(
                "Event was quarantined in the dead-letter queue (DLQ).",
                extra={
                    "event_id": event.id,
                    "dlq_id": dead_letter.id,
                    "retry_count": retry_count,
                    "error": delivery.reason,
                },
            )
        return status

    async def _give_back(self, deliveries: Deliveries) -> None:
        """Cancel the deliveries, and release the events whose answer had not arrived: PROCESSING -> PENDING."""
        for delivery in deliveries:
            delivery.cancel()
        for delivery, event in list(deliveries.items()):
            if not delivery.done():
                await asyncio.wait([delivery])
            if delivery.cancelled():
                try:
                    await self._store.release(event, retry_in=0.0)
                    self._report_recovery(RELEASE_FAULT)
                except Exception as error:
                    self._report(RELEASE_FAULT, error)

    def _log_lost_lease(self, event: OutboxEvent) -> None:
        logger.warning(
            "Lease lost: another dispatcher has taken the event over, and its result stands.",
            extra={"event_id": event.id, "retry_count": event.retry_count},
        )

    # --- what both need ---

    @asynccontextmanager
    async def _http_client(self) -> AsyncGenerator[httpx.AsyncClient, None]:
        if self._client is not None:
            yield self._client
        else:
            client = create_client()
            try:
                yield client
            finally:
                await run_to_end(client.aclose())

    def _report(self, fault: str, error: Exception) -> None:
        """Log a fault once per cause, not once per try: an hour of a locked database is a line, not thousands."""
        cause = f"{type(error).__name__}: {error}"
        if cause not in self._faults[fault]:
            self._faults[fault].add(cause)
            logger.error(fault, extra={"error": cause}, exc_info=error)

    def _report_recovery(self, fault: str) -> None:
        if self._faults.pop(fault, None):
            logger.info("Recovered from: %s", fault)
