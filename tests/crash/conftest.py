"""One forking process serves all crash tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.zygote import Zygote, running_zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with running_zygote() as running:
        yield running
