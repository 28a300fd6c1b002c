"""Starts a notebook's kernel as a fork of the process that `stppo.preloaded` serves, else as Jupyter does."""

from __future__ import annotations

import os
import sys
from typing import Any

from jupyter_client.provisioning import LocalProvisioner

from stppo.preloaded import KERNEL, Fork


class PreloadedProvisioner(LocalProvisioner):
    """Jupyter's way to start a kernel on this machine, but for the start itself."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        """Connection of the started kernel. Kernels of another Python, or another language, start as ever."""
        if os.path.realpath(cmd[0]) != os.path.realpath(sys.executable) or KERNEL not in cmd:
            return await super().launch_kernel(cmd, **kwargs)
        try:
            self.process = Fork(cmd[cmd.index(KERNEL) :], kwargs.get("env"), kwargs.get("cwd"), session=True)
        except OSError:
            return await super().launch_kernel(cmd, **kwargs)
        self.pid = self.pgid = self.process.pid
        self.cwd = kwargs.get("cwd", os.getcwd())
        return self.connection_info
