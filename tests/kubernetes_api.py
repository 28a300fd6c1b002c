"""A stand-in for Kubernetes' API on loopback, of as much as Snakemake's plug-in asks.

Its pods are processes of this machine, each in an empty folder of its own, in the environment that runs the tests.
"""

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import yaml


class Api:
    """The server, as a context; `jobs` are the manifests that it got, in order.

    watch(job, kill): called, in a thread of its own, for each job once its pod runs; kill() ends the pod as a lost node does.
    """

    def __init__(self, folder: Path, watch: Callable[[dict, Callable], None]) -> None:
        self.folder, self.watch = folder, watch
        self.jobs: list[dict] = []
        self.secrets: dict[str, dict] = {}
        self.pods: dict[str, subprocess.Popen] = {}
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/pip").write_text(
            "#!/bin/sh\nexit 0\n"
        )  # pods install their storage plug-in; here it is there
        (folder / "bin/pip").chmod(0o755)

    def __enter__(self) -> "Api":
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                (api.start if self.path.endswith("/jobs") else api.keep)(sent)
                self.answer(sent)

            def do_GET(self) -> None:
                self.answer(api.told(self.path))

            def do_DELETE(self) -> None:
                self.answer({"kind": "Status"})

            def answer(self, what: dict | str) -> None:
                body = (what if isinstance(what, str) else json.dumps(what)).encode()
                self.send_response(200)
                self.send_header(
                    "Content-Type", "text/plain" if isinstance(what, str) else "application/json"
                )
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{self.server.server_port}"
        clusters = [{"name": "c", "cluster": {"server": place}}]
        contexts = [{"name": "c", "context": {"cluster": "c", "user": "u"}}]
        config = {"clusters": clusters, "contexts": contexts, "users": [{"name": "u", "user": {}}]}
        self.config = self.folder / "config"
        self.config.write_text(yaml.safe_dump(config | {"current-context": "c"}))
        return self

    def __exit__(self, *_) -> None:
        for pod in self.pods.values():
            self.kill(pod)
        self.server.shutdown()

    def kill(self, pod: subprocess.Popen) -> None:
        if pod.poll() is None:
            first = psutil.Process(pod.pid)
            first.suspend()  # so that it starts nothing meanwhile
            for process in [
                first,
                *first.children(recursive=True),
            ]:  # a kernel has a process group of its own
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        pod.wait()

    def keep(self, secret: dict) -> None:
        self.secrets[secret["metadata"]["name"]] = secret["data"]

    def start(self, job: dict) -> None:
        self.jobs.append(job)
        name, (container,) = job["metadata"]["name"], job["spec"]["template"]["spec"]["containers"]
        environment = os.environ | {
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        for variable in container.get("env", []):
            asked = variable["valueFrom"]["secretKeyRef"]
            environment[variable["name"]] = base64.b64decode(
                self.secrets[asked["name"]][asked["key"]]
            ).decode()
        workdir = self.folder / name
        workdir.mkdir()
        with open(self.folder / f"{name}.log", "wb") as out:
            pod = self.pods[name] = subprocess.Popen(
                [*container["command"], *container["args"]],
                cwd=workdir, env=environment, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self.watch, args=(job, lambda: self.kill(pod)), daemon=True).start()

    def told(self, path: str) -> dict | str:
        if path.split("?")[0].endswith("/log"):
            return (self.folder / f"{path.split('/pods/')[1].split('/')[0]}.log").read_text()
        if "/pods?" in path:
            name = path.split("job-name%3D")[1].split("&")[0]
            status = {
                "name": "snakemake",
                "image": "",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {},
            }
            if (code := self.pods[name].poll()) is not None:
                status["state"] = {"terminated": {"exitCode": code % 256}}
            pod = {"metadata": {"name": name}, "status": {"containerStatuses": [status]}}
            return {"items": [pod]}
        job = next(job for job in self.jobs if f"/{job['metadata']['name']}/" in path)
        code = self.pods[job["metadata"]["name"]].poll()
        return job | {
            "status": {} if code is None else {"failed": int(code != 0), "succeeded": int(code == 0)}
        }
