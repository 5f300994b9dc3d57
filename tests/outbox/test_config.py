"""Settings are checked once, at the start, and the error names the field (Section 3)."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from outbox.config import AppConfig

URL = "http://127.0.0.1:8000/webhooks"
NOT_FINITE = [float("nan"), float("inf"), float("-inf"), "nan", "inf"]
TIMES = ["poll_interval", "request_timeout", "lease_seconds", "base_backoff", "max_backoff"]
COUNTS = ["batch_size", "max_in_flight", "max_delivery_attempts"]


def refused_fields(**values: Any) -> list[str]:
    with pytest.raises(ValidationError) as refused:
        AppConfig(**{"consumer_endpoint": URL} | values)
    return [str(error["loc"][0]) for error in refused.value.errors()]


def test_only_the_endpoint_has_no_default_and_the_defaults_are_those_of_the_article() -> None:
    config = AppConfig(consumer_endpoint=URL)
    assert (config.batch_size, config.max_in_flight, config.max_delivery_attempts) == (10, 10, 3)
    assert config.permanent_failure_statuses == {400, 410, 413, 422}
    assert config.synchronous == "NORMAL"
    assert config.lease_seconds > config.request_timeout

    with pytest.raises(ValidationError) as refused:
        AppConfig()  # type: ignore[call-arg]
    assert [error["loc"] for error in refused.value.errors()] == [("consumer_endpoint",)]


@pytest.mark.parametrize("value", [*NOT_FINITE, 0, -1, "soon", None, []])
@pytest.mark.parametrize("field", TIMES)
def test_a_time_is_a_finite_number_of_seconds_above_zero(field: str, value: Any) -> None:
    assert field in refused_fields(**{field: value})


@pytest.mark.parametrize("value", [*NOT_FINITE, 0, -1, 1.5, "many", None, [], 2**63])
@pytest.mark.parametrize("field", COUNTS)
def test_a_count_is_a_whole_number_above_zero_that_the_database_can_hold(field: str, value: Any) -> None:
    assert refused_fields(**{field: value}) == [field]


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", " ", "webhooks", "localhost:8000/webhooks", "//localhost/webhooks", "/webhooks"),
        *("ftp://localhost/", "file:///etc/passwd", "unix:///run/socket", "ws://localhost/", "javascript:alert(1)"),
        *("http://", "http:///webhooks", "http:webhooks", "https://?x=1", "http://:8000/"),
        *(
            "http://localhost:port/",
            "http://localhost:99999/",
            "http://localhost:0/",
            "http://[::1/",
            "http://a\nb/",
            "http://xn--\xe9/",
        ),
        *(None, 8000, ["http://localhost/"]),
    ],
)
def test_the_endpoint_is_an_http_url_with_a_host(endpoint: Any) -> None:
    assert refused_fields(consumer_endpoint=endpoint) == ["consumer_endpoint"]


@pytest.mark.parametrize(
    "endpoint", ["http://localhost", "HTTPS://Example.com/hooks?x=1", "http://[::1]:8000/", "http://bücher.example/"]
)
def test_an_http_url_is_kept_as_it_was_given(endpoint: str) -> None:
    assert AppConfig(consumer_endpoint=endpoint).consumer_endpoint == endpoint


@given(endpoint=st.one_of(st.text(), st.text().map("http://{}".format), st.from_regex(r"http://[a-z:@/%\[\]]*")))
@settings(deadline=None)
def test_whatever_text_the_endpoint_is_it_is_taken_or_named(endpoint: str) -> None:
    named: list[tuple[int | str, ...]] = []
    try:
        AppConfig(consumer_endpoint=endpoint)
    except ValidationError as refused:
        named = [error["loc"] for error in refused.errors()]
    assert named in ([], [("consumer_endpoint",)])


@pytest.mark.parametrize("value", [0, 100, 200, 299, 600, -1, "teapot", None])
def test_only_a_failure_can_be_a_permanent_failure(value: Any) -> None:
    assert refused_fields(permanent_failure_statuses={400, value}) == ["permanent_failure_statuses"]


@pytest.mark.parametrize("value", [400, "400", None, {"400": 1, "x": 2}])
def test_permanent_failures_are_a_set(value: Any) -> None:
    assert "permanent_failure_statuses" in refused_fields(permanent_failure_statuses=value)


@pytest.mark.parametrize("value", ["OFF", "normal", "", None, 1])
def test_synchronous_is_one_of_the_two_that_lose_nothing(value: Any) -> None:
    assert refused_fields(synchronous=value) == ["synchronous"]


@pytest.mark.parametrize("value", [None, 1, b"outbox.db"])
def test_db_path_is_a_path(value: Any) -> None:
    assert refused_fields(db_path=value) == ["db_path"]
    assert AppConfig(consumer_endpoint=URL, db_path=Path("x.db")).db_path == Path("x.db")


@pytest.mark.parametrize("field", ["batchsize", "Batch_Size", "timeout", "client"])
def test_an_unknown_field_is_refused_by_its_name(field: str) -> None:
    assert refused_fields(**{field: 1}) == [field]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"request_timeout": 10, "lease_seconds": 9}, "lease_seconds"),
        ({"request_timeout": 10, "lease_seconds": 10}, "lease_seconds"),
        ({"lease_seconds": 10}, "lease_seconds"),  # the default request_timeout is as long
        ({"request_timeout": 30}, "lease_seconds"),  # the default lease is as long
        ({"base_backoff": 2, "max_backoff": 1}, "max_backoff"),
        ({"max_backoff": 0.4}, "max_backoff"),  # the default base_backoff is longer
        ({"base_backoff": 61}, "max_backoff"),  # the default max_backoff is shorter
    ],
)
def test_two_times_that_are_unsafe_together_are_refused(values: dict[str, float], field: str) -> None:
    assert refused_fields(**values) == [field]


def test_two_times_that_are_just_safe_together_are_taken() -> None:
    AppConfig(consumer_endpoint=URL, request_timeout=10, lease_seconds=10.001, base_backoff=1, max_backoff=1)


def test_every_bad_field_is_named_at_once() -> None:
    fields = refused_fields(consumer_endpoint="ftp://x/", batch_size=0, poll_interval=-1, lease=1)
    assert fields == ["consumer_endpoint", "batch_size", "poll_interval", "lease"]


def test_a_config_cannot_be_changed() -> None:
    config = AppConfig(consumer_endpoint=URL)
    with pytest.raises(ValidationError) as refused:
        config.batch_size = 1  # type: ignore[misc]
    assert [error["loc"] for error in refused.value.errors()] == [("batch_size",)]
    assert config.batch_size == 10
    assert hash(config) == hash(AppConfig(consumer_endpoint=URL))
