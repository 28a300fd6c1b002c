"""Recall of BM25 on real questions, and what an index on disk costs as the corpus grows.

    python benchmarks/retrieval.py --data DIR --recall --fit
    python benchmarks/retrieval.py --data DIR --passages 1000000 5000000 21015324 --scratch FOLDER [--phases ...]

DIR is that of `benchmarks/corpus.py`, which makes the passages. Each run adds its part to results/reference/retrieval.json
and renders retrieval.md from the whole; the phases of a size may be run apart, FOLDER keeps what they made. Each phase has its
provenance with it; older ones have that of their size.
"""

import argparse
import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import bm25s
import corpus
import numpy as np
import pandas as pd
from bm25s.selection import topk

from stppo.config.provenance import git_state, hardware, versions
from stppo.files import write_atomically, write_json
from stppo.retrieval.bm25 import BM25Retriever, words
from stppo.retrieval.bm25_index import build_bm25, open_bm25
from stppo.retrieval.client import RetrievalClient
from stppo.retrieval.documents import Document, read_corpus, scan_corpus
from stppo.world.datasets import read_records
from stppo.world.environment import SearchEnvironment
from stppo.world.protocol import Protocol, Question
from stppo.world.scripted import GoldTitleSearcher, paragraph_key, play, recall_at_k

OUT = Path(__file__).parents[1] / "results" / "reference"
BENCHMARKS = ("hotpotqa", "2wikimultihopqa", "musique")
CUTS = (1, 3, 5, 10)
TURN_BUDGET = 4
TOP_K = 3  # results a query, as Search-R1's agents ask for
CLIENTS, SERVED = (1, 4, 16), 400  # questions asked of the server by each number of clients
MEMORY_LIMIT = 12 * 2**30  # bytes of bm25s's own indexing


# ---- recall -------------------------------------------------------------------------------------


def gold_title_recall(retriever: BM25Retriever, questions: list[Question], k: int) -> float:
    """Mean share of a question's gold paragraphs in what the gold-title searcher retrieves, k passages a search."""
    environment = SearchEnvironment(Protocol(turn_budget=TURN_BUDGET), retriever, k)
    world = SimpleNamespace(
        environment=environment,
        scripted_agent=lambda asked, rng, noise: GoldTitleSearcher(asked, TURN_BUDGET),
    )
    shares = []
    for episode in play(world, questions, random.Random(0)):
        read = {paragraph_key(d.title, d.text) for turn in episode.turns for d in turn.documents}
        gold = {paragraph_key(*paragraph) for paragraph in episode.question.gold_paragraphs}
        shares.append(len(gold & read) / len(gold))
    return fmean(shares)


def measure_recall(data: Path) -> dict[str, Any]:
    documents = read_corpus(data / "corpus.jsonl")
    retriever = BM25Retriever(documents)
    rows = []
    for benchmark in BENCHMARKS:
        questions = read_records(benchmark, data / benchmark / "records.jsonl")
        judged = [question for question in questions if question.gold_paragraphs]
        environment = SearchEnvironment(Protocol(), retriever, 1)
        ways = {
            "question": lambda k, e=environment, q=judged: recall_at_k(e, q, k),
            "gold titles": lambda k, q=judged: gold_title_recall(retriever, q, k),
        }
        for way, recall in ways.items():
            row = {"benchmark": benchmark, "query": way, "questions": len(judged)}
            rows.append(row | {str(k): recall(k) for k in CUTS})
    return {"passages": len(documents), "rows": rows}


# ---- size ---------------------------------------------------------------------------------------


def memory_kib(*fields: str, process: int | str = "self") -> dict[str, int]:
    lines = dict(
        line.split(":") for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":" in line
    )
    return {field: int(lines[field].split()[0]) for field in fields}


class Watch(threading.Thread):
    """Peaks of RssAnon (KiB; what the process holds itself, without pages of files, which the system may drop) and, once a
    second, of GiB on disk below `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.peak_kib, self.disk, self.over = folder, 0, [], threading.Event()

    def run(self) -> None:
        began = time.perf_counter()
        while not self.over.wait(0.02):
            self.peak_kib = max(self.peak_kib, memory_kib("RssAnon")["RssAnon"])
            if time.perf_counter() - began > len(self.disk):
                self.disk.append(on_disk(self.folder))


def on_disk(folder: Path) -> float:
    """GiB of blocks of files below the folder, which may come and go meanwhile."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += 512 * os.stat(Path(place, name)).st_blocks
    return round(size / 2**30, 4)


def watched(work, folder: Path, data: Path) -> dict[str, Any]:
    """Run in a process of its own: what `work` returns, its seconds, memory (MiB) and disk."""
    before = memory_kib("RssAnon")["RssAnon"]
    watch = Watch(folder)
    watch.start()
    load = os.getloadavg()[0]
    began, cpu = time.perf_counter(), time.process_time()
    found = work(folder, data)
    spent = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    watch.over.set()
    watch.join()
    return (
        found
        | spent
        | {
            "own_mib_before": before / 1024,
            "own_mib_peak": watch.peak_kib / 1024,
            # Not ru_maxrss, which a process inherits from the one that started it.
            "resident_mib_peak": memory_kib("VmHWM")["VmHWM"] / 1024,
            "disk_gib_peak": max(watch.disk, default=None),
            "load": [load, os.getloadavg()[0]],
        }
    )


def build(folder: Path, data: Path) -> dict[str, Any]:
    made = build_bm25(folder / "corpus.jsonl", folder / "index")
    size = sum(path.stat().st_size for path in (folder / "index").iterdir())
    return {name: made[name] for name in ("documents", "words", "postings")} | {
        "corpus_mib": (folder / "corpus.jsonl").stat().st_size / 2**20,
        "index_mib": size / 2**20,
    }


def killed(folder: Path, data: Path) -> dict[str, Any]:
    """A build that is killed when it has read half of the corpus: what it leaves on disk, and how soon the next has removed it."""
    source, left = folder / "corpus.jsonl", folder / ".index.building"
    code = f"from stppo.retrieval.bm25_index import build_bm25; build_bm25({str(source)!r}, {str(folder / 'index')!r})"

    def start() -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", code])

    build = start()
    began = time.perf_counter()
    half = source.stat().st_size / 2
    while position(build.pid, source) < half:
        if build.poll() is not None:
            raise RuntimeError("the build was over before it could be killed")
        time.sleep(0.002)
    spent = time.perf_counter() - began
    build.kill()
    build.wait()
    found = {"seconds_until": spent, "left_gib": on_disk(left)}
    build = start()
    began = time.perf_counter()
    while on_disk(left) > found["left_gib"] / 2 and build.poll() is None:
        time.sleep(0.05)
    found["removed_after_seconds"] = time.perf_counter() - began
    build.kill()
    build.wait()
    return found


def position(process: int, file: Path) -> int:
    """How far a process has read a file, in bytes; 0 where it has not opened it."""
    most = 0
    with suppress(OSError):  # it may close what is looked at
        for link in Path(f"/proc/{process}/fd").iterdir():
            if os.path.realpath(link) == str(file.resolve()):
                pos = Path(f"/proc/{process}/fdinfo/{link.name}").read_text().split()[1]
                most = max(most, int(pos))
    return most


def quantiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{q}": 1e3 * float(np.percentile(seconds, q)) for q in (50, 90, 99)}


def timed(
    search, questions: list[Question], k: int
) -> tuple[list[list[tuple[Document, float]]], dict[str, Any]]:
    """What each question finds, asked alone; milliseconds of the processor and of the clock."""
    found, wall, cpu = [], [], []
    for question in questions:
        began, worked = time.perf_counter(), time.process_time()
        found += search([question.text], k)
        cpu.append(time.process_time() - worked)
        wall.append(time.perf_counter() - began)
    return found, {"cpu_ms": quantiles(cpu), "ms": quantiles(wall)}


def search(folder: Path, data: Path) -> dict[str, Any]:
    """Each question once, twice over with nothing remembered but the system's pages; what is found of the hidden."""
    questions = corpus.read_questions(data)
    began = time.perf_counter()
    retriever = open_bm25(folder / "index")
    opened = time.perf_counter() - began
    found, first = timed(retriever.search, questions, max(CUTS))
    _, again = timed(open_bm25(folder / "index").search, questions, TOP_K)
    real = {paragraph_key(d.title, d.text): f"real-{d.id}" for d in read_corpus(data / "corpus.jsonl")}
    recall: dict[str, dict[str, Any]] = {}
    for question, ranking in zip(questions, found, strict=True):
        gold = {real.get(paragraph_key(*pair)) for pair in question.gold_paragraphs} - {None}
        wanted = gold or {corpus.planted_id(question)}
        row = recall.setdefault(question.source, {"questions": 0} | {str(k): 0.0 for k in CUTS})
        row["questions"] += 1
        for k in CUTS:
            row[str(k)] += len(wanted & {document.id for document, _ in ranking[:k]}) / len(wanted)
    for row in recall.values():
        row.update({str(k): row[str(k)] / row["questions"] for k in CUTS})
    return {
        "open_seconds": opened,
        "questions": len(questions),
        "first": first,
        "again": again,
        "recall": recall,
    }


def bm25s_search(folder: Path, data: Path) -> dict[str, Any]:
    """bm25s itself, which adds up the scores of all passages, over the same arrays read into memory."""
    questions = corpus.read_questions(data)
    ours = open_bm25(folder / "index")
    index = bm25s.BM25.load(folder / "index", load_vocab=False)
    numbers = [[ours._vocabulary.get(word) for word in words(q.text)] for q in questions]
    numbers = [[n for n in asked if n is not None] for asked in numbers]
    scores, wall, cpu = [], [], []
    for asked in numbers:
        began, worked = time.perf_counter(), time.process_time()
        found, _ = topk(index.get_scores_from_ids(asked), TOP_K, backend="numpy")
        cpu.append(time.process_time() - worked)
        wall.append(time.perf_counter() - began)
        scores.append(found.tolist())
    same = sum(
        [score for _, score in ranking] == theirs
        for ranking, theirs in zip(ours.search([q.text for q in questions], TOP_K), scores, strict=True)
    )
    return {
        "questions": len(questions),
        "same_scores": same,
        "again": {"cpu_ms": quantiles(cpu), "ms": quantiles(wall)},
    }


def bm25s_build(folder: Path, data: Path) -> dict[str, Any]:
    """bm25s's own indexing, in memory; an error where MEMORY_LIMIT does not suffice."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    try:
        numbers: dict[str, int] = {}
        ids = [
            [numbers.setdefault(word, len(numbers)) for word in words(f"{document.title} {document.text}")]
            for _, document in scan_corpus(folder / "corpus.jsonl")
        ]
        index = bm25s.BM25(method="lucene")
        index.index((ids, numbers), create_empty_token=False, show_progress=False)
        return {"postings": len(index.scores["data"])}
    except MemoryError:
        return {"error": f"more than {MEMORY_LIMIT / 2**30:.0f} GiB"}


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, int]]:
    """Address and process of `stppo retriever serve`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from stppo.cli import main; main()", "retriever", "serve"]
    process = subprocess.Popen(
        [*command, str(folder / "index"), "--port", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}/retrieve"
        RetrievalClient(url).search(["ready"], 1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def serve(folder: Path, data: Path) -> dict[str, Any]:
    """The server asked each of some questions once by 1, 4 and 16 clients at a time, one a request."""
    questions = random.Random(0).sample([q.text for q in corpus.read_questions(data)], SERVED)
    runs = {}
    for clients in CLIENTS:
        with server(folder) as (url, process), ThreadPoolExecutor(clients) as pool:
            client = RetrievalClient(url, timeout=120)

            def ask(text: str, client=client) -> float:
                began = time.perf_counter()
                client.search([text], TOP_K)
                return time.perf_counter() - began

            began = time.perf_counter()
            times = list(pool.map(ask, questions))
            seconds = time.perf_counter() - began
            spent = os.sysconf("SC_CLK_TCK")
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            runs[str(clients)] = {
                "ms": quantiles(times),
                "a_second": len(times) / seconds,
                "server_cpu_seconds": (int(fields[11]) + int(fields[12])) / spent,
                "server_own_mib": memory_kib("RssAnon", process=process)["RssAnon"] / 1024,
                "load": os.getloadavg()[0],
            }
    return {"questions": len(questions), "clients": runs}


PHASES = {
    "killed": killed,
    "build": build,
    "search": search,
    "serve": serve,
    "bm25s_search": bm25s_search,
    "bm25s_build": bm25s_build,
}


def measure_size(
    n: int, data: Path, folder: Path, phases: list[str], provenance: dict[str, Any]
) -> dict[str, Any]:
    """Each phase in a process of its own, its numbers in `folder`; what lies there at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    if phases and not (folder / "corpus.jsonl").exists():
        worked = time.process_time()
        made = corpus.write_corpus(corpus.Sample(data), folder / "corpus.jsonl", n)
        spent = {"cpu_seconds": time.process_time() - worked}
        write_json(folder / "made.json", made | spent | {"provenance": provenance})
    for phase in phases:
        command = [sys.executable, __file__, "--data", data, "--phase", phase, "--folder", folder]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        write_json(folder / f"{phase}.json", found | {"provenance": provenance})
        print(n, phase, found, flush=True)
    return {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in ("made", *PHASES)
        if (folder / f"{name}.json").is_file()
    }


# ---- report -------------------------------------------------------------------------------------


TOLD = {
    "killed": "A build killed half way: seconds until then, GiB that it leaves, and seconds until the next build, which begins anew, has "
    "removed most of it",
    "build": "Build: seconds, GiB on disk, and own memory (RssAnon, without pages of files) in MiB",
    "search": f"One query at a time in one process: milliseconds, first for {max(CUTS)} passages with what the build left in "
    f"memory, again for {TOP_K}; share of gold or planted passages among the best k",
    "serve": "Through the server: milliseconds of a request with one question, and questions a second; none is asked twice",
    "bm25s_search": "bm25s in memory, all scores added up: milliseconds of a query",
    "bm25s_build": "bm25s's own indexing",
}


ASIDE = ("load", "provenance")  # kept, and in no table


def render(found: dict[str, Any]) -> str:
    parts = [
        "# Retrieval",
        "Made by `benchmarks/retrieval.py`; provenance in [retrieval.json](retrieval.json).",
    ]
    if recall := found.get("recall"):
        parts += [
            "## Recall of BM25",
            f"Mean share of a question's gold paragraphs found, over {recall['passages']:,} passages: all paragraphs of these "
            "questions, gold and distracting, so this is easier than all of Wikipedia. With the question as query, the k best "
            "passages count; the gold-title searcher asks for each gold title in turn and reads k passages each time (at most "
            f"{TURN_BUDGET} searches), which bounds what a searching agent could read.",
            pd.DataFrame(recall["rows"]).to_markdown(index=False, floatfmt=".3f"),
        ]
    if fit := found.get("fit"):
        parts += [
            "## The made-up corpus",
            f"`benchmarks/corpus.py` makes it from the {fit['passages']:,} real passages: ranks by the law "
            f"{', '.join(f'{name} {value:.2f}' for name, value in fit['law'].items())}; {fit['repeat']:.0%} of a passage's words "
            "repeat an earlier one of it. The table sets the sample beside a made-up corpus of its size; a large one has passages "
            f"{fit['stretch']:.2f} times as long, as Search-R1's Wikipedia has. Words stand together by chance alone: fewer "
            "passages than in text hold several words of a question.",
            pd.DataFrame(fit["rows"]).to_markdown(index=False, floatfmt=",.1f"),
        ]
    if sizes := found.get("sizes"):
        parts += [
            "## A BM25 index on disk",
            "By number of passages, on a machine of two cores that had other work.",
        ]
        for phase, title in TOLD.items():
            measured = {
                n: pd.json_normalize(
                    {name: part for name, part in run[phase].items() if name not in ASIDE}
                ).iloc[0]
                for n, run in sizes.items()
                if phase in run
            }
            table = pd.DataFrame(measured)
            table = table.map(lambda value: f"{value:,.2f}" if isinstance(value, float) else str(value))
            parts += [
                f"### {title}",
                table.to_markdown(disable_numparse=True) if measured else "Not measured.",
            ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recall", action="store_true", help="of the real questions over the real passages")
    parser.add_argument("--fit", action="store_true", help="of a made-up corpus to the real passages")
    parser.add_argument("--passages", type=int, nargs="*", default=[])
    parser.add_argument("--phases", nargs="*", choices=PHASES, default=list(PHASES))
    parser.add_argument(
        "--scratch",
        type=Path,
        help="a folder for each size (2 GB a million); what lies there is used, and stays",
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        print(json.dumps(watched(PHASES[options.phase], options.folder, options.data)))
        return
    if options.passages and options.scratch is None:
        parser.error("--passages needs --scratch")
    record = options.out / "retrieval.json"
    found = json.loads(record.read_text()) if record.is_file() else {}
    provenance = {"versions": versions(), "hardware": hardware(), **git_state()}
    if options.recall:
        found["recall"] = measure_recall(options.data) | {"provenance": provenance}
    if options.fit:
        found["fit"] = corpus.fit(corpus.Sample(options.data)) | {"provenance": provenance}
    for n in sorted(options.passages):
        made = measure_size(n, options.data, options.scratch / str(n), options.phases, provenance)
        sizes = found.setdefault("sizes", {})
        sizes[str(n)] = sizes.get(str(n), {}) | made
        found["sizes"] = dict(sorted(sizes.items(), key=lambda item: int(item[0])))
    write_json(record, found)
    report = render(found)
    write_atomically(options.out / "retrieval.md", lambda part: part.write_text(report, encoding="utf-8"))
    print(report)


if __name__ == "__main__":
    main()
