"""Both packages in one service: `python -m examples.checkout`.

A checkout asks a payment service before it takes an order, and tells others when it has. The question is a call that
the customer waits for, so a circuit breaker guards it. The news is a fact that must not get lost, so it goes through
the outbox. The program starts the service, the payment service and a webhook consumer on this machine, breaks the
payment service, and shows what the customer sees.
"""

import asyncio
import logging
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from circuit_breaker import CircuitBreakerConfig, CircuitBreakerOpenException, JsonStructuredFormatter
from circuit_breaker import mock_service as payments
from circuit_breaker.fastapi_handler import circuit_open_handler
from circuit_breaker.httpx_transport import CircuitBreakerTransport
from outbox import mock_consumer as consumer
from outbox.config import AppConfig
from outbox.database import SQLiteStore
from outbox.dispatcher import OutboxDispatcher
from outbox.models import OrderCreate

ORDER = {"customer_email": "ada@example.com", "amount": "149.90"}


def create_checkout(store: SQLiteStore, payment_client: httpx.AsyncClient) -> FastAPI:
    """`POST /orders`: 201 with the order's id, 502 when the payment service refuses, 503 while its circuit is open."""
    app = FastAPI()
    app.add_exception_handler(CircuitBreakerOpenException, circuit_open_handler)

    @app.post("/orders", status_code=201)
    async def place_order(order_create: OrderCreate) -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
        (await payment_client.post("/charge", json={"amount": str(order_create.amount)})).raise_for_status()
        order, _ = await store.create_order_with_outbox_event(order_create)
        return {"id": order.id}

    @app.exception_handler(httpx.HTTPError)
    async def upstream_failed(*_: object) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse({"detail": "the payment service failed"}, 502)

    return app


@asynccontextmanager
async def running(
    database: Path, payment_service: payments.MockService, idempotency_store: consumer.InMemoryIdempotencyStore
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """Start the three services and the dispatcher, and give the block a client of the checkout."""
    async with AsyncExitStack() as stack:
        payment_url = await stack.enter_async_context(payments.serve(payments.create_app(payment_service)))
        webhook_url = await stack.enter_async_context(consumer.serve(consumer.create_app(idempotency_store)))
        breaker = CircuitBreakerTransport(config=CircuitBreakerConfig(failure_threshold=3))
        payment_client = httpx.AsyncClient(base_url=payment_url, transport=breaker)
        await stack.enter_async_context(payment_client)
        store = await stack.enter_async_context(SQLiteStore(database))
        config = AppConfig(db_path=database, consumer_endpoint=f"{webhook_url}/webhooks")
        await stack.enter_async_context(OutboxDispatcher(config, store))
        checkout = create_checkout(store, payment_client)
        checkout_url = await stack.enter_async_context(consumer.serve(checkout))
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=checkout_url))


def log_transitions() -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonStructuredFormatter())
    logging.getLogger("circuit_breaker").addHandler(handler)


async def main() -> int:
    log_transitions()
    payment_service, idempotency_store = payments.MockService(), consumer.InMemoryIdempotencyStore()
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder) / "checkout.db", payment_service, idempotency_store) as customer:
            placed = [(await customer.post("/orders", json=ORDER)).status_code for _ in range(3)]
            print(f"payment service up:    {placed}")

            payment_service.behaviour.mode = payments.Mode.FAIL
            refused = [(await customer.post("/orders", json=ORDER)) for _ in range(5)]
            print(f"payment service down:  {[answer.status_code for answer in refused]}")
            print(f"requests that reached it: {payment_service.requests}")
            print(f"the customer may come back in {refused[-1].headers['Retry-After']} s")

            async with asyncio.timeout(10):
                while idempotency_store.side_effects_count < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            print(f"orders that others heard of: {idempotency_store.side_effects_count}")
    return 0 if placed == [201] * 3 and payment_service.requests == 6 else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
