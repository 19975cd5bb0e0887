"""Settings of all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from spirv_kernels import Runner

    from rudnn.runtime.cache import DiskCache

# With TVM and torch loaded, the usual collections take a tenth of the time of compiling.
gc.set_threshold(100_000, 20, 100)

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
def vulkan_is_silent() -> Iterator[None]:
    """The validation layer has nothing to say about all of a file."""
    from rudnn.runtime.targets.vulkan import instance
    from rudnn.runtime.targets.vulkan.driver import driver

    yield
    if driver().device_names():
        assert "\n".join(instance.validation_messages()) == ""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """What runs device functions on the first Vulkan device."""
    from spirv_kernels import Runner

    return Runner(tmp_path_factory.mktemp("spirv"))


@pytest.fixture(scope="session")
def native_cache(tmp_path_factory: pytest.TempPathFactory) -> DiskCache:
    """Where tests of the native runtime have it built."""
    from rudnn.runtime.cache import DiskCache

    return DiskCache(tmp_path_factory.mktemp("native-cache"))


@pytest.fixture(scope="session")
def native_library(native_cache: DiskCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of `native_kernels`, linked as compiled ones are."""
    from native_kernels import KERNELS, NO_COMPILER

    from rudnn.runtime.targets.llvm import toolchain

    if toolchain.find_compiler() is None:
        pytest.skip(NO_COMPILER)
    folder = tmp_path_factory.mktemp("native")
    source, compiled = folder / "kernels.c", folder / "kernels.o"
    source.write_text(KERNELS)
    toolchain.run_compiler(["-O1", "-fPIC", "-c", source, "-o", compiled])
    stub = toolchain.build_runtime(native_cache).file(toolchain.KERNEL_OBJECT)
    return toolchain.link([compiled, stub], folder / "kernels.so")


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A compile cache of a file's own: for tests that clear it."""
    from rudnn.runtime import compiler
    from rudnn.runtime.cache import DiskCache

    previous = compiler.disk_cache()
    compiler._DISK = DiskCache(tmp_path_factory.mktemp("cache"))
    yield
    compiler._DISK = previous
