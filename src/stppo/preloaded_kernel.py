"""Starts a notebook's kernel as a fork of the process that `stppo.preloaded` serves, else as Jupyter does."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from typing import Any

from jupyter_client.provisioning import LocalProvisioner

from stppo.preloaded import KERNEL, Fork


class PreloadedProvisioner(LocalProvisioner):
    """Jupyter's way to start a kernel here, but for the start itself, and for sockets that are files."""

    folder = ""  # of the kernel's sockets

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """The launch's keywords. Two kernels that start at once may pick the same TCP port, and one dies."""
        if os.name == "posix" and not self.folder:
            self.folder = tempfile.mkdtemp(prefix="stppo-kernel-")  # its owner's alone
        if self.folder and len(os.fsencode(self.folder)) < 90:  # what every system lets a socket's path be
            self.parent.transport, self.parent.ip = "ipc", f"{self.folder}/socket"
        return await super().pre_launch(**kwargs)

    async def cleanup(self, restart: bool = False) -> None:
        """As Jupyter's; without the sockets of a kernel that is not started again."""
        await super().cleanup(restart)
        if self.folder and not restart:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""

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
