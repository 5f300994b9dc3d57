"""What a FastAPI application answers while a circuit is open.

app.add_exception_handler(CircuitBreakerOpenException, circuit_open_handler)
"""

import math

from fastapi import Request
from fastapi.responses import JSONResponse

from circuit_breaker.exceptions import CircuitBreakerOpenException


def retry_after_header(error: CircuitBreakerOpenException) -> str:
    """`retry_after_seconds` as HTTP has it: whole seconds, rounded up, at least 1."""
    return str(max(1, math.ceil(error.retry_after_seconds)))


async def circuit_open_handler(request: Request, error: Exception) -> JSONResponse:
    """503 with `Retry-After`. The body names no circuit: which upstreams there are is no client's business."""
    if not isinstance(error, CircuitBreakerOpenException):
        raise error
    return JSONResponse(
        {"detail": "Service temporarily unavailable"},
        status_code=503,
        headers={"Retry-After": retry_after_header(error)},
    )
