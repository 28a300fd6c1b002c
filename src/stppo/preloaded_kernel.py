"""Starts a notebook's kernel as a fork of the process that `stppo.preloaded` serves, else as Jupyter does."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from jupyter_client.provisioning import LocalProvisioner
from jupyter_core.paths import jupyter_runtime_dir

from stppo.preloaded import KERNEL, Fork


class PreloadedProvisioner(LocalProvisioner):
    """Jupyter's way to start a kernel here, but for the start itself, and for sockets that are files."""

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """The launch's keywords. Two kernels that start at once may pick the same TCP port, and one dies."""
        socket = Path(jupyter_runtime_dir(), f"kernel-{self.kernel_id}-ipc")
        if os.name == "posix" and len(os.fsencode(socket)) < 100:  # what every system lets a socket's path be
            socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.parent.transport, self.parent.ip = "ipc", str(socket)
        return await super().pre_launch(**kwargs)

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
