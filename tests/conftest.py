"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before anything makes the Vulkan instance: what its validation layer says fails a test.
os.environ.setdefault("RUDNN_VULKAN_VALIDATION", "1")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that kernels on the host allocate is NaN first."""
    from rudnn.runtime.device import host

    host().driver.poison(True)
    yield
    host().driver.poison(False)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A compile cache of a file's own: for tests that clear it."""
    from rudnn.runtime import compiler
    from rudnn.runtime.cache import DiskCache

    previous = compiler.disk_cache()
    compiler._DISK = DiskCache(tmp_path_factory.mktemp("cache"))
    yield
    compiler._DISK = previous
