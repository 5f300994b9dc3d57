"""What a caller may have to catch (article, Section 4.1)."""


class CircuitBreakerError(Exception):
    """Base of every error that the breaker itself raises.

    `message` is for people, `circuit_name` says which breaker spoke (None when it is not known).
    """

    __slots__ = ("__weakref__", "circuit_name", "message")

    def __init__(self, message: str, circuit_name: str | None = None) -> None:
        super().__init__(message, circuit_name)
        self.message = message
        self.circuit_name = circuit_name

    def __str__(self) -> str:
        return self.message


class CircuitBreakerOpenException(CircuitBreakerError):  # noqa: N818 - the article's name
    """The call was rejected in memory; the upstream was not touched.

    `remaining_seconds`: until the circuit lets a probe through (0.0 in HALF_OPEN: any moment now).
    `backoff_seconds`: a full-jitter delay, drawn for this rejection, so that callers do not come back together.
    """

    __slots__ = ("backoff_seconds", "remaining_seconds")

    def __init__(
        self,
        message: str,
        circuit_name: str | None = None,
        remaining_seconds: float = 0.0,
        backoff_seconds: float = 0.0,
    ) -> None:
        # Slots, and no super().__init__(), which would only store the arguments again: each rejection pays for this.
        self.message = message
        self.circuit_name = circuit_name
        self.remaining_seconds = remaining_seconds
        self.backoff_seconds = backoff_seconds

    def __reduce__(self) -> tuple[object, ...]:
        # By default exceptions pickle and copy by `args`, which lack whatever was passed by keyword.
        fields = (self.message, self.circuit_name, self.remaining_seconds, self.backoff_seconds)
        return type(self), fields, self.__dict__

    @property
    def retry_after_seconds(self) -> float:
        """How long the caller should stay away: `remaining_seconds` + `backoff_seconds`."""
        return self.remaining_seconds + self.backoff_seconds

    def __str__(self) -> str:
        wait = self.retry_after_seconds
        return f"{self.message}, retry in {wait:.2f} s" if wait else self.message
