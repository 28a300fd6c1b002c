"""One attack of each kind, from a seed. An attack that is not survived raises; what surviving means stands in its docstring."""

import contextlib
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml

from stppo import cli
from stppo.config.composition import compose
from stppo.files import parse_json
from stppo.policy.policy import load_policy
from stppo.record.progress import all_progress
from stppo.record.runs import read_run
from stppo.record.schema import TIMING_COLUMNS
from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.client import RetrievalClient, RetrievalUnavailable
from stppo.retrieval.documents import Document, read_corpus
from stppo.training.checkpoint import load_checkpoint, newest, save_checkpoint
from stppo.world.datasets import read_records
from stppo.world.protocol import PARSERS, Protocol, Question, neutralise_tags
from stppo.world.rewards import exact_match, score, search_r1_answer
from tests.conftest import TINY, make_start
from tests.training_runs import run

ROOT = Path(__file__).parents[2]

# A run that the n-th rename, truncation or wait for the disk kills, before or after it happens, or that a disk of so many
# bytes holds up.
TRAIN = """
import os, resource, signal, sys
from stppo.config.composition import compose
from stppo.config.loading import load
from stppo.training.run import Run
from tests.conftest import TINY

folder, start, algorithm, kill_at, room = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
calls = 0

def watched(original):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        done = original(*arguments, **options)
        if -calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    return call

if kill_at:
    for name in ("rename", "replace", "fsync", "ftruncate", "mkdir"):
        setattr(os, name, watched(getattr(os, name)))
if room:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
its_run = Run(load(compose([*TINY, f"algorithm={algorithm}"])), folder, start, progress=False)
trainer = its_run.trainer
print("ready", flush=True)
try:
    its_run.train()
except OSError as error:
    print(f"stopped: {error}", file=sys.stderr)
    sys.exit(3)
"""


class Stage:
    """What attacks share: a folder, a warm start, and the tables of a run that nothing disturbed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "start").mkdir(parents=True)
        self.start = make_start(folder / "start")
        run(compose([*TINY, "algorithm=st_ppo"]), folder / "undisturbed", self.start)
        self.expected = tables(folder / "undisturbed")
        self.number = 0

    def fresh(self) -> Path:
        self.number += 1
        return self.folder / f"attack-{self.number}"


def tables(folder: Path) -> list[pd.DataFrame]:
    read = [pd.read_parquet(folder / f"{name}.parquet") for name in ("updates", "evaluations")]
    return [table.drop(columns=[c for c in TIMING_COLUMNS if c in table]) for table in read]


def train(
    stage: Stage, folder: Path, algorithm: str = "st_ppo", kill_at: int = 0, room: int = 0
) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    command = [sys.executable, "-c", TRAIN, str(folder), str(stage.start), algorithm, str(kill_at), str(room)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=stage.folder
    )


def assert_ends_as_undisturbed(stage: Stage, folder: Path) -> None:
    run(compose([*TINY, "algorithm=st_ppo"]), folder, stage.start)
    for found, expected in zip(tables(folder), stage.expected, strict=True):
        pd.testing.assert_frame_equal(found, expected, check_exact=True)
    assert not list(folder.rglob(".part-*")) and not (folder / ".lock").exists(), "debris"
    shutil.rmtree(folder)


def kill(stage: Stage, rng: random.Random) -> None:
    """SIGKILL before or behind a write, or at any moment: the run goes on and ends bit for bit as undisturbed."""
    folder = stage.fresh()
    kill_at = rng.choice([-1, 1]) * rng.randint(1, 90)
    process = train(stage, folder, kill_at=rng.choice([0, kill_at, kill_at]))
    if kill_at and process.stdout.readline():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, 3) if rng.random() < 0.4 else 120)
    process.kill()
    _, said = process.communicate()
    assert "Traceback" not in said, said[-1000:]
    assert_ends_as_undisturbed(stage, folder)


def two_writers(stage: Stage, rng: random.Random) -> None:
    """Two runs in one folder: one is refused in one line, and the record is that of the other."""
    folder = stage.fresh()
    names = rng.sample(["st_ppo", "token_ppo", "turn_ppo"], 2)
    writers = [train(stage, folder, name) for name in names]
    said = [writer.communicate(timeout=300)[1] for writer in writers]
    codes = [writer.returncode for writer in writers]
    refused = [s for s, code in zip(said, codes, strict=True) if code]
    # Where the second began after the first had ended, it is told of the other's checkpoint.
    assert codes.count(0) == 1 and ("is in use by" in refused[0] or "is of another run" in refused[0]), said
    recorded = json.loads((folder / "run.json").read_text())["algorithm"]
    configured = yaml.safe_load((folder / "config.yaml").read_text())["algorithm"]["name"]
    assert recorded == configured == names[codes.index(0)]
    shutil.rmtree(folder)


def full_disk(stage: Stage, rng: random.Random) -> None:
    """No file beyond so many bytes: one line, and with room again the run ends as undisturbed."""
    folder = stage.fresh()
    process = train(stage, folder, room=rng.choice([300, 3_000, 20_000, 60_000, 200_000]))
    _, said = process.communicate(timeout=300)
    assert process.returncode in (0, 3) and "Traceback" not in said, said[-1000:]
    assert_ends_as_undisturbed(stage, folder)


PIECES = [
    *(
        "<search>",
        "</search>",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "<information>",
        "</information>",
    ),
    *(
        "< ",
        "<|im_end|>",
        "<|",
        "Oslo",
        " Oslo ",
        "oslo.",
        "Bergen",
        "\n",
        " ",
        "\x00",
        "\ud800",
        "ſ",
        "é",
        "<",
        "</",
        ">",
        "",
    ),
]
QUESTION = Question("q", "What is the capital of Norway?", ("Oslo",))


def thousand_outputs(stage: Stage, rng: random.Random) -> None:
    """A thousand turns of a hostile model: none raises, and only an answer block that says so is right."""
    protocol = Protocol()
    for _ in range(1000):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 14)))
        for parse in PARSERS.values():
            action = parse(text)
            assert action.kind in ("search", "answer", "invalid")
            if action.kind == "answer" and score(QUESTION, action.content):
                assert exact_match(action.content, ("Oslo",)) and "<answer>" in text and "slo" in text
        search_r1_answer([text])
        protocol.sentence_ends(text)
        shown = neutralise_tags(text)
        shown.encode()
        assert not any(tag in shown for tag in PIECES[:8]) and "<|im_end|>" not in shown


def bad_file(stage: Stage, rng: random.Random) -> None:
    """A damaged or forged file: whoever reads it raises one of the errors that become one line, or reads what is whole."""
    folder = stage.fresh()
    folder.mkdir()
    kind = rng.choice(["weights", "checkpoint", "run", "corpus", "records", "json"])
    readers = {
        "corpus": lambda: read_corpus(folder / "f.jsonl"),
        "records": lambda: read_records("nq", folder / "f.jsonl"),
        "json": lambda: parse_json((folder / "f.jsonl").read_bytes()),
        "weights": lambda: load_policy(folder / "w"),
        "checkpoint": lambda: load_checkpoint(folder / "c", "f"),
        "run": lambda: (all_progress(folder), read_run(folder / "r")),
    }
    if kind == "weights":
        shutil.copytree(stage.start, folder / "w")
        file = folder / "w" / rng.choice(["config.json", "model.safetensors"])
    elif kind == "checkpoint":
        save_checkpoint(folder / "c", "f", {"iteration": 1, "rows": [{"a": 1.5}], "policy": {}})
        file = newest(folder / "c") / "state.json"
    elif kind == "run":
        shutil.copytree(
            stage.folder / "undisturbed", folder / "r", ignore=shutil.ignore_patterns("checkpoint", "policy")
        )
        file = (
            folder / "r" / rng.choice(["run.json", "updates.parquet", "evaluations.parquet", "config.yaml"])
        )
    else:
        file = folder / "f.jsonl"
        file.write_text('{"id": "1", "contents": "\\"T\\"\\ntext", "question": "q", "answer": ["a"]}\n' * 3)
    file.write_bytes(damaged(file.read_bytes(), rng))
    with contextlib.suppress(ValueError, OSError):
        readers[kind]()
    shutil.rmtree(folder)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, doubled or filled; of JSON also one value replaced."""
    place = rng.randrange(len(content))
    foreign = rng.choice(
        [b"null", b"[]", b"{}", b'"z"', b"-1", b"1e999", b"1" * 5000, b"[" * 5000, b'"\\ud800"', b"true"]
    )
    ways = [
        content[:place],
        content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :],
        content[:place] + content,
        rng.randbytes(100),
        b"",
        foreign,
    ]
    try:
        whole = json.loads(content)
    except ValueError:
        return rng.choice(ways)
    node = whole
    while True:
        names = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not names:
            return rng.choice(ways)
        name = rng.choice(names)
        if not isinstance(node[name], dict | list) or not node[name] or rng.random() < 0.4:
            break
        node = node[name]
    if rng.random() < 0.2 and isinstance(node, dict):
        del node[name]
    else:
        node[name] = rng.choice([None, [], {}, "z", -1, 1e300, True, 5, "owner/repo:f"])
    return rng.choice([json.dumps(whole).encode(), json.dumps(whole).encode(), rng.choice(ways)])


KEYS = ["seed", "preset", "algorithm", "training.epochs", "training.learning_rate", "rollout.max_tokens", "policy", "world",
        "evaluation.questions", "warm_start.noise", "algorithm.objective.clip", "pipeline.regimes", "loggers", "world.seed",
        "policy.hidden_size", "training.divisors.from_run", "nothing.at.all", "hydra.run", "algorithm.objective._target_"]  # fmt: skip
VALUES = ["", "null", "-1", "1e300", "nan", "99999999999999999999", "abc", "[]", "{}", "[1,2", "{a:1}", "'", "\x00", "${oc.env:HOME}",
          "${x}", "range(0,1e8)", "0,1,2", "true", "../../etc", "os.system", "é\ud800", "choice(", "[[[[]]]]"]  # fmt: skip


def bad_command(stage: Stage, rng: random.Random) -> None:
    """A command with foreign values: it is refused in one line, or it is valid and comes to where training would begin."""
    command = rng.choice([["train"], ["train", "preset=smoke"], ["plan"], ["plan", "preset=smoke"]])
    sign = ["", "", "+", "~", "++"]
    arguments = [
        f"{rng.choice(sign)}{rng.choice(KEYS)}={rng.choice(VALUES)}" for _ in range(rng.randint(1, 3))
    ]
    said = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.chdir(stage.folder)
        patch.setattr(cli, "train_one", lambda *_: "would train")
        patch.setattr(sys, "argv", ["stppo", *command, *arguments])
        try:
            cli.main()
        except SystemExit as stop:
            if stop.code:
                lines = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
                assert stop.code == 2 or (len(lines) == 1 and "unexpected" not in lines[0]), (
                    arguments,
                    said.getvalue(),
                )


def hostile_server(stage: Stage, rng: random.Random) -> None:
    """Whatever a server sends, and however slowly: the client has an answer or RetrievalUnavailable in its time."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n"
    parts = [head, b"HTTP/1.1 100 Continue\r\n\r\n", b"X: y\r\n", b'{"result": [[', b"\x00" * 50, b"[" * 9000, b"\r\n", b"]]}",
             rng.randbytes(30), b"HTTP/1.1 301 x\r\nLocation: /\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n", b"fffffff\r\n"]  # fmt: skip
    sent = rng.choices(parts, k=rng.randint(0, 6))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    for part in sent:
                        connection.sendall(part)
                        time.sleep(rng.choice([0, 0.1]))
                    time.sleep(rng.choice([0, 2]))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/retrieve"
        began = time.monotonic()
        with contextlib.suppress(RetrievalUnavailable):
            RetrievalClient(url, timeout=0.3, attempts=1).search(["q"], 1)
        assert time.monotonic() - began < 5, sent
        thread.join(5)


def hostile_client(stage: Stage, rng: random.Random) -> None:
    """Fifty connections with half or foreign requests: the server goes on answering others."""
    from stppo.retrieval.server import Limits, create_app
    from tests.test_retrieval_server import served

    del create_app
    parts = [b"POST /retrieve HTTP/1.1\r\n", b"Host: x\r\n", b"Content-Length: 9999\r\n", b"Content-Length: -1\r\n", b"\r\n", b'{"queries": ["a"]}',
             b"Transfer-Encoding: chunked\r\n", b"zz\r\n", b"A" * 70_000, rng.randbytes(50), b"GET /health HTTP/9\r\n", b"[" * 3000]  # fmt: skip
    documents = [Document("0", "Oslo", "capital of Norway")]
    with served(BM25Retriever(documents), Limits(seconds=1)) as base, contextlib.ExitStack() as open_ones:
        port = int(base.rsplit(":", 1)[1])
        for _ in range(50):
            connection = open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            with contextlib.suppress(OSError):
                connection.sendall(b"".join(rng.choices(parts, k=rng.randint(0, 5))))
        (found,) = RetrievalClient(f"{base}/retrieve", timeout=20, attempts=1).search(["norway"], 1)
        assert found[0][0] == documents[0]


ATTACKS = {
    "kills before, inside and behind writes": kill,
    "two writers in one folder": two_writers,
    "full disk": full_disk,
    "1,000 hostile model outputs": thousand_outputs,
    "damaged and forged files": bad_file,
    "bad commands": bad_command,
    "hostile retrieval server": hostile_server,
    "hostile retrieval clients": hostile_client,
}
