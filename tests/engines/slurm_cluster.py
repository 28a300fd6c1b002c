"""A throw-away Slurm on this machine: its own configuration, munge key, ports and state, in one folder; needs root.

Each of its nodes is a slurmd in a PID and UTS namespace of its own, so that it has a name of its own and that killing
the first process of the namespace takes all of the node's jobs with it, as a lost machine does.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "unshare")
NODES = ("stppo1", "stppo2")
# No slurmdbd, hence no `sacct`. CPUs are promised, not counted.
# A requeued job waits until credentials have expired, two minutes by default.
CONFIGURATION = """ClusterName=stppo
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={slurmd_timeout}
KillWait=2
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
FirstJobId={first_job}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Slurm's daemons in `folder`, as a context; `environment` is what its clients need.

    slurmd_timeout: seconds after which a silent node counts as lost.
    """

    def __init__(self, folder: Path, slurmd_timeout: int = 8, cpus: int = 2) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._nodes: dict[str, subprocess.Popen] = {}
        self._daemons: list[subprocess.Popen] = []
        ports = _free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=16000 State=UNKNOWN"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname(),
                folder=folder,
                ports=ports,
                nodes="\n".join(nodes),
                slurmd_timeout=slurmd_timeout,
                first_job=1000,
            )
        )

    def __enter__(self) -> Cluster:
        Path("/etc/slurm").mkdir(exist_ok=True)  # where nodes mount the folder, each for itself
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        try:
            self._daemon(
                "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
                f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log",
                f"--seed-file={self.folder}/munge.seed",
            )  # fmt: skip
            until(lambda: (self.folder / "munge.socket").exists(), 20, "munged listens")
            self._daemon("slurmctld", "-D", "-c")
            for name in NODES:
                self.start_node(name)
            until(lambda: all(self.state(name) == "IDLE" for name in NODES), 60, "both nodes are idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in list(self._nodes):
            self.lose_node(name)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, *command: str) -> None:
        with open(self.folder / f"{command[0]}.out", "ab") as out:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=out, stderr=out))

    def start_node(self, name: str) -> None:
        """The node comes up, for the first time or again."""
        # Snakemake's jobs drop SLURM_CONF, so the node has this configuration where a real one has it.
        script = f"hostname {name} && mount --bind {self.folder} /etc/slurm && exec slurmd -D -N {name}"
        unshare = [
            "unshare",
            "--pid",
            "--uts",
            "--mount",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
        ]
        with open(self.folder / f"{name}.out", "ab") as out:
            self._nodes[name] = subprocess.Popen(
                [*unshare, script], env=self.environment, stdout=out, stderr=out, start_new_session=True
            )

    def lose_node(self, name: str) -> None:
        """SIGKILL to the node's first process, and with it by the kernel to all others."""
        node = self._nodes.pop(name)
        node.send_signal(signal.SIGKILL)  # --kill-child
        node.wait()

    def call(self, *command: str) -> str:
        """What a command of Slurm's prints; CalledProcessError where it fails."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    def state(self, name: str) -> str:
        """A node's state, as IDLE, MIXED or DOWN; empty while slurmctld does not answer."""
        try:
            shown = self.call("sinfo", "-h", "-N", "-n", name, "-o", "%T")
        except subprocess.CalledProcessError:
            return ""
        return shown.upper().rstrip("*")

    def jobs(self) -> list[dict[str, str]]:
        """All jobs that slurmctld remembers: id, state, node, times restarted and comment, which names the rule."""
        fields = {
            "JobId": "id",
            "JobState": "state",
            "NodeList": "node",
            "Restarts": "restarts",
            "Comment": "comment",
        }
        return [
            {
                name: (re.search(rf"(?:^| ){field}=(\S*)", line) or ["", ""])[1]
                for field, name in fields.items()
            }
            for line in self.call("scontrol", "--oneliner", "show", "job").splitlines()
            if line.startswith("JobId=")
        ]


def why_not() -> str | None:
    """Why no cluster can be made here."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "a throw-away Slurm needs root"


def until(true: Callable[[], bool], seconds: float, what: str, step: float = 0.1) -> None:
    """Wait until something holds; TimeoutError with `what` where it does not come."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds} s not yet: {what}")
        time.sleep(step)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
