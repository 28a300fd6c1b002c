#!/usr/bin/env bash
# Guessed: whoever starts a Jupyter kernel holds the ports that it has chosen for it, so that two kernels that start at once
# get different ones.
# So is: five free ports are looked up, let go again, and written into the connection file; the kernel binds them a second
# later. Until then they are anybody's, another kernel's too. The cache of ports that are taken is one process's own.
# jupyter_client 8.10.0.
# Why it matters: papermill runs or pytest workers side by side are processes of their own. Now and then two kernels get one
# port, and the later dies: "Kernel didn't respond in 60 seconds". Sockets that are files (transport "ipc", under a name of
# the kernel's own) cannot collide.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet jupyter_client==8.10.0
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import socket
import sys
from importlib.metadata import version

from jupyter_client import KernelManager

manager = KernelManager(connection_file="kernel.json")
manager.write_connection_file()
ports = [manager.shell_port, manager.iopub_port, manager.stdin_port, manager.hb_port, manager.control_port]
free = []
for port in ports:
    with socket.socket() as other:
        try:
            other.bind((manager.ip, port))
            free.append(port)
        except OSError:
            pass
print("jupyter_client", version("jupyter_client"))
print(f"{len(free)} of the {len(ports)} ports in the connection file can be taken by another process")
if not free:
    sys.exit("CHANGED: the ports are held until the kernel has them")
PYTHON
