"""What holds for the tests of both packages."""

import signal


def pytest_configure() -> None:
    """Started in the background of a shell, the tests inherit that SIGINT is ignored; so would what they interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
