"""Vulkan devices: which there are, what is missing, and what a process does before it uses one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from processes import printed
from spirv_kernels import needs_vulkan

from rudnn.dsl.errors import DeviceError, TargetError
from rudnn.runtime.cache import DiskCache
from rudnn.runtime.targets.vulkan import Vulkan, stream
from rudnn.runtime.targets.vulkan import instance as instances

pytestmark = [pytest.mark.usefixtures("vulkan_is_silent"), needs_vulkan]


def test_a_child_forked_before_the_first_use_has_a_device() -> None:
    code = """
import os
from rudnn.runtime.device import Device, Queue
from rudnn.runtime.targets.vulkan.driver import driver
child = os.fork()
queue = Queue(Device("vulkan", 0, driver().device_names()[0], driver()))
assert driver().allocate(4, queue).nbytes == 4
if child == 0: os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert printed(code).strip() == "0"


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = """
import sys
import rudnn
from rudnn.runtime.targets.vulkan import Vulkan
assert Vulkan().identity("portable", None) == "portable"
print(sorted({"vulkan", "tvm", "cffi"} & set(sys.modules)))
"""
    assert printed(code).strip() == "[]"


@pytest.mark.parametrize(
    "spoil, hint",
    [
        ("import sys; sys.modules['vulkan'] = None", "pip install 'rudnn[vulkan]'"),
        ("import os; os.environ.update(VK_ICD_FILENAMES='/', VK_DRIVER_FILES='/')",
         "apt install mesa-vulkan-drivers libvulkan1"),
    ],
)  # fmt: skip
def test_a_machine_without_vulkan_compiles_and_says_what_is_missing(spoil: str, hint: str) -> None:
    code = f"""
{spoil}
from rudnn.runtime.targets.vulkan import Vulkan
target = Vulkan()
status = target.status()
assert status.can_compile and not status.can_run
assert target.driver().device_names() == ()
assert target.identity("", None) == "portable" and target.capability("").model == "grid"
print(status.hint)
"""
    assert printed(code, RUDNN_VULKAN_VALIDATION="").strip() == hint


def test_which_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    software = instances.surveyed()[0][0]
    names = ("llvmpipe", "Arc 770", "RX 9070")
    found = [
        replace(software, facts=replace(software.facts, name=name, kind=4 if i == 0 else 2))
        for i, name in enumerate(names)
    ]
    monkeypatch.setattr(instances, "surveyed", lambda: [*((d, "") for d in found), (software, "x")])
    for wanted, first in (
        ("", "Arc 770"),
        ("0", "llvmpipe"),
        ("9070", "RX 9070"),
        ("ARC", names[1]),
    ):
        monkeypatch.setenv("RUDNN_VULKAN_DEVICE", wanted)
        listed = [d.facts.name for d in instances.physical_devices.__wrapped__()]
        assert listed[0] == first and sorted(listed) == sorted(names)
    monkeypatch.setenv("RUDNN_VULKAN_DEVICE", "42")
    with pytest.raises(DeviceError, match="needs one of the devices 0 llvmpipe, 1 Arc 770"):
        instances.physical_devices.__wrapped__()


def test_architectures() -> None:
    target = Vulkan()
    assert target.capability("portable").max_threads == 256
    assert target.capability("").subgroup == instances.physical_devices()[0].facts.subgroup
    assert target.identity("0", DiskCache()) == target.identity("", DiskCache())
    for arch in ("99", "sm_90"):
        with pytest.raises(TargetError, match=f"got vulkan:{arch}"):
            target.capability(arch)


def test_the_time_out_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUDNN_VULKAN_TIMEOUT", raising=False)
    assert stream.timeout_s() == 600
