#!/usr/bin/env bash
# Guessed: a rule with `gpu=0` asks Kubernetes for no GPU, as it asks Slurm for none. So is: the plug-in looks whether the name `gpu` is
# there; with 0 it stops for want of `gpu_manufacturer`, and with that a pod asks for 0 GPUs and may go to the nodes that are kept for GPUs.
# Packages: snakemake 9.27.1, snakemake-executor-plugin-kubernetes 0.5.1. Matters: pipelines that write `gpu=0` for a CPU run.
set -euo pipefail
work=$(mktemp -d)
server=
trap 'kill $server 2>/dev/null || true; rm -rf "$work"' EXIT
command -v rsync git > /dev/null || { echo "needs rsync and git"; exit 1; }
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$work/venv
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet snakemake==9.27.1 snakemake-executor-plugin-kubernetes==0.5.1 snakemake-storage-plugin-fs==1.1.3
fi
export PATH="$FINDINGS_VENV/bin:$PATH" KUBECONFIG="$work/config"
cd "$work"
# In place of a cluster: it notes manifests, and every job has succeeded.
cat > server.py <<'PYTHON'
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.command == "POST" and self.path.endswith("/jobs"):
            print(json.dumps(json.loads(sent)["spec"]["template"]["spec"]), file=open("manifest.json", "w"))
        body = sent if self.command == "POST" else b'{"items": [], "status": {"succeeded": 1}}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_POST = do_DELETE = answer
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(json.dumps({"clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "users": [{"name": "u", "user": {}}],
    "current-context": "c"}), file=open("config", "w"), flush=True)
server.serve_forever()
PYTHON
python server.py &
server=$!
for _ in $(seq 50); do [ -s config ] && break || sleep 0.2; done
mkdir flow && cd flow && git init --quiet
cat > Snakefile <<'SNAKEFILE'
rule one:
    output: "one.txt"
    resources: gpu=0
    shell: "date > {output}"
SNAKEFILE
git add Snakefile
echo "snakemake $(python -m snakemake --version), plug-in $(pip list 2>/dev/null | grep executor-plugin-kubernetes | xargs)"
submit() { # the end is an error, for nobody makes the file
  python -m snakemake --executor kubernetes --jobs 1 --default-storage-provider fs --default-storage-prefix "$work/store" \
    --latency-wait 1 one.txt "$@" > log 2>&1 || true
}
submit
grep -o "GPU requested but no manufacturer set." log || { echo "CHANGED: gpu=0 is no wish"; tail log; exit 1; }
[ ! -e ../manifest.json ] || { echo "CHANGED: a pod was started"; exit 1; }
submit --default-resources gpu_manufacturer=nvidia
python - <<'PYTHON'
import json
spec = json.load(open("../manifest.json"))
asked, tolerated = spec["containers"][0]["resources"]["requests"], [t["key"] for t in spec.get("tolerations", [])]
print("with a manufacturer the pod asks for", asked, "and tolerates", tolerated)
assert asked.get("nvidia.com/gpu") == "0" and tolerated == ["nvidia.com/gpu"], "CHANGED"
PYTHON
