"""Any order of events, against a model that is small enough to be believed.

The machine runs no event loop: it steps each call's coroutine by hand, so that Hypothesis alone decides what happens
next. The model remembers every call that was ever admitted and derives the rest; it shares no code with the breaker.
"""

import logging
import types
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from circuit_breaker import (
    CircuitBreaker,
    CircuitBreakerConfig,
    CircuitBreakerOpenException,
    Outcome,
    Transition,
)
from circuit_breaker.testing import FakeClock

RECOVERY, PROBE_LIMIT = 10, 7


class Said(Exception):  # noqa: N818 - not an error, an answer
    """Raised by the upstream: the outcome as an error."""


@types.coroutine
def until_told() -> Generator[None, Any, Any]:
    return (yield)


async def upstream() -> Outcome:
    outcome: Outcome
    outcome, as_error = await until_told()
    if as_error:
        raise Said(outcome)
    return outcome


def classify(result: Any, error: Exception | None) -> Any:
    return result if error is None else error.args[0]


@dataclass(eq=False)
class Call:
    coroutine: Coroutine[Any, Any, Any]
    era: int
    started: int
    verdict: Outcome | None = None


class Model:
    """What the circuit should be, computed from the calls of the present era."""

    def __init__(self, threshold: int, cap: int) -> None:
        self.threshold, self.cap = threshold, cap
        self.state, self.era, self.since, self.streak = "CLOSED", 0, 0, 0
        self.calls: list[Call] = []

    def enter(self, state: str, now: int) -> None:
        self.state, self.era, self.since = state, self.era + 1, now
        if state == "CLOSED":
            self.streak = 0

    def here(self, *verdicts: Outcome | None) -> list[Call]:
        return [call for call in self.calls if call.era == self.era and call.verdict in verdicts]

    def admits(self, now: int) -> bool:
        if self.state == "OPEN" and now - self.since >= RECOVERY:
            self.enter("HALF_OPEN", now)
        elif self.state == "HALF_OPEN" and any(now - call.started >= PROBE_LIMIT for call in self.here(None)):
            self.enter("OPEN", now)
        if self.state == "HALF_OPEN":
            return len(self.here(None, Outcome.SUCCESS, Outcome.ALIVE)) < self.cap
        return self.state == "CLOSED"

    def settle(self, call: Call, verdict: Outcome, now: int) -> None:
        call.verdict = verdict
        if call.era != self.era:
            return
        if verdict is Outcome.FAILURE:
            self.streak += 1
            if self.state == "HALF_OPEN" or self.streak >= self.threshold:
                self.enter("OPEN", now)
        elif verdict is Outcome.SUCCESS and self.state == "CLOSED":
            self.streak = 0
        if self.state == "HALF_OPEN" and len(self.here(Outcome.SUCCESS, Outcome.ALIVE)) == self.cap:
            self.enter("CLOSED", now)


class BreakerMachine(RuleBasedStateMachine):
    examples: ClassVar[int] = 0
    reached_half_open: ClassVar[int] = 0

    @initialize(threshold=strategies.integers(1, 3), cap=strategies.integers(1, 3), sick=strategies.booleans())
    def begin(self, threshold: int, cap: int, sick: bool) -> None:
        config = CircuitBreakerConfig(
            failure_threshold=threshold,
            half_open_max_calls=cap,
            recovery_time_seconds=RECOVERY,
            half_open_timeout_seconds=PROBE_LIMIT,
        )
        self.clock = FakeClock(0)
        self.breaker = CircuitBreaker("model", config, classify=classify, clock=self.clock)
        self.model = Model(threshold, cap)
        self.heard: list[Transition] = []
        self.breaker.add_listener(self.heard.append)
        if sick:
            self.outage()

    @property
    def now(self) -> int:
        return int(self.clock())

    @property
    def running(self) -> list[Call]:
        return [call for call in self.model.calls if call.verdict is None]

    @rule()
    def admit(self) -> None:
        coroutine = self.breaker.call(upstream)
        expected = self.model.admits(self.now)
        try:
            coroutine.send(None)
        except CircuitBreakerOpenException:
            assert not expected
        else:
            assert expected
            self.model.calls.append(Call(coroutine, self.model.era, self.now))

    @precondition(lambda self: self.running)
    @rule(data=strategies.data(), outcome=strategies.sampled_from(Outcome), as_error=strategies.booleans())
    def finish(self, data: strategies.DataObject, outcome: Outcome, as_error: bool) -> None:
        call = data.draw(strategies.sampled_from(self.running))
        self.model.settle(call, outcome, self.now)
        with pytest.raises((StopIteration, Said)):
            call.coroutine.send((outcome, as_error))

    @precondition(lambda self: self.running)
    @rule()
    def fail_the_oldest(self) -> None:
        call = self.running[0]
        self.model.settle(call, Outcome.FAILURE, self.now)
        with pytest.raises(Said):
            call.coroutine.send((Outcome.FAILURE, True))

    @precondition(lambda self: self.running)
    @rule(data=strategies.data(), error=strategies.sampled_from([GeneratorExit, KeyboardInterrupt, SystemExit]))
    def cancel(self, data: strategies.DataObject, error: type[BaseException]) -> None:
        call = data.draw(strategies.sampled_from(self.running))
        self.model.settle(call, Outcome.IGNORED, self.now)
        if error is GeneratorExit:
            call.coroutine.close()
        else:
            with pytest.raises(error):
                call.coroutine.throw(error)

    @rule()
    def outage(self) -> None:
        """The way into HALF_OPEN, which single steps at random take too seldom."""
        for _ in range(self.model.threshold):
            self.admit()
            if self.running:
                self.fail_the_oldest()
        self.advance(RECOVERY)
        self.admit()

    @rule()
    def drop_before_it_runs(self) -> None:
        self.breaker.call(upstream).close()

    @rule(seconds=strategies.sampled_from([1, PROBE_LIMIT - 1, PROBE_LIMIT, RECOVERY - 1, RECOVERY]))
    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.model.era % 4 == 3)  # seldom: by hand is not how most circuits move
    @rule(trip=strategies.booleans())
    def move_by_hand(self, trip: bool) -> None:
        self.model.enter("OPEN" if trip else "CLOSED", self.now)
        with pytest.raises(StopIteration):
            (self.breaker.trip() if trip else self.breaker.reset()).send(None)

    @invariant()
    def breaker_and_model_agree(self) -> None:
        seen = self.breaker.snapshot()
        assert seen.state == self.model.state
        assert seen.generation == self.model.era == len(self.heard)
        assert seen.consecutive_failures == self.model.streak
        open_for = max(0, RECOVERY - (self.now - self.model.since))
        assert seen.remaining_seconds == (open_for if seen.state == "OPEN" else 0)
        if seen.state == "HALF_OPEN":
            assert seen.probes_in_flight == len(self.model.here(None))
            assert seen.half_open_successes == len(self.model.here(Outcome.SUCCESS, Outcome.ALIVE))
        else:
            assert (seen.probes_in_flight, seen.half_open_successes) == (0, 0)

    def teardown(self) -> None:
        for call in self.running:
            call.coroutine.close()
        BreakerMachine.examples += 1
        BreakerMachine.reached_half_open += any(event.to_state == "HALF_OPEN" for event in self.heard)


def test_the_breaker_agrees_with_the_model_after_every_step(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="circuit_breaker")  # thousands of lines that nobody reads
    run_state_machine_as_test(
        BreakerMachine,
        settings=settings(
            max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    share = BreakerMachine.reached_half_open / BreakerMachine.examples
    with capsys.disabled():
        print(f" [HALF_OPEN in {share:.0%} of {BreakerMachine.examples} examples] ", end="")
    assert share > 0.5
