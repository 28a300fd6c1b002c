"""A CPU as one of verl's platforms. verl 0.9.1 has three (NVIDIA, ROCm, Ascend) and an interface for more; this fills it.

Loaded by verl itself, in every process: VERL_USE_EXTERNAL_MODULES=tests.engines.verl_on_cpu and VERL_PLATFORM=cpu.
No code of verl is patched.
"""

import os
import sys
from contextlib import nullcontext
from types import ModuleType

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

# verl's actor does not start beside TRL 1.16: it patches a class that TRL dropped (models/transformers/monkey_patch.py:352)
# wherever TRL is installed. In these processes it is not.
sys.modules["trl"] = None


class Device(ModuleType):
    """What verl asks of `torch.cuda` and `torch.cpu` does not have: there is no memory of a device's own to report."""

    def is_available(self) -> bool:
        return False

    def empty_cache(self) -> None:
        pass

    def max_memory_allocated(self) -> int:
        return 0

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0

    def get_device_name(self) -> str:
        return "CPU"

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = Device("cpu")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # VERL_PLATFORM alone chooses it

    def current_device(self) -> torch.device:  # a number would mean a GPU
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        """Begins the group of processes where Ray has placed one: verl asks this first, and would then ask torch for
        "cpu:gloo,cpu:gloo" (utils/distributed.py:89), which names the CPU twice. It leaves alone a group that is there."""
        if "WORLD_SIZE" in os.environ and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str):
        return nullcontext()

    def profiler_start(self) -> None:
        pass

    profiler_stop = profiler_start

    def ray_resource_name(self) -> str:
        return "GPU"  # Ray is told that there are some: verl places its workers by them

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
