"""Recall of BM25 on real questions, and what an index on disk costs as the corpus grows.

    python benchmarks/retrieval.py --data DIR                     recall; DIR holds corpus.jsonl, hotpotqa/records.jsonl, ...
    python benchmarks/retrieval.py --passages 100000 1000000      disk, memory and latency on made-up passages

Each writes its part of results/reference/retrieval.json and renders retrieval.md from the whole.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from stppo.config.provenance import git_state, hardware, versions
from stppo.files import write_atomically, write_json
from stppo.retrieval.bm25 import BM25Retriever, words
from stppo.retrieval.bm25_index import build_bm25, open_bm25
from stppo.retrieval.documents import read_corpus
from stppo.world.datasets import read_records
from stppo.world.environment import SearchEnvironment
from stppo.world.protocol import Protocol, Question
from stppo.world.scripted import GoldTitleSearcher, paragraph_key, play, recall_at_k

OUT = Path(__file__).parents[1] / "results" / "reference"
BENCHMARKS = ("hotpotqa", "2wikimultihopqa", "musique")
CUTS = (1, 3, 5, 10)
TURN_BUDGET = 4
WIKIPEDIA = 21_015_324  # passages of 100 words of the 2018 dump, Search-R1's corpus
HEAD, TAIL_EXPONENT, WORDS_PER_PASSAGE = 8_000, 1.6, 100


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


class Vocabulary:
    """Word ranks like those of text: Zipf's law with exponent 1 for the 8,000 commonest, 1.6 for the endless rest.

    The rest makes the number of different words grow like (words)^(1/1.6), Heaps' law as in English.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        weights = 1 / (np.arange(1, HEAD + 1) + 2.7)
        tail = HEAD / (HEAD + 2.7) / (TAIL_EXPONENT - 1)
        self.cumulative = np.cumsum(weights) / (weights.sum() + tail)

    def draw(self, n: int) -> np.ndarray:
        """n ranks from 1 on."""
        uniform = self.rng.random(n)
        ranks = np.searchsorted(self.cumulative, uniform) + 1
        rest = ranks > HEAD
        share = (uniform[rest] - self.cumulative[-1]) / (1 - self.cumulative[-1])
        ranks[rest] = np.minimum(HEAD * (1 - share) ** (-1 / (TAIL_EXPONENT - 1)), 2**52) + 1
        return ranks


def write_passages(path: Path, n: int) -> None:
    vocabulary = Vocabulary(0)
    with open(path, "w", encoding="utf-8") as file:
        for start in range(0, n, 10_000):
            count = min(10_000, n - start)
            ranks = vocabulary.draw(count * WORDS_PER_PASSAGE).tolist()
            texts = [
                " ".join(map("{:x}".format, ranks[i : i + WORDS_PER_PASSAGE]))
                for i in range(0, len(ranks), WORDS_PER_PASSAGE)
            ]
            file.writelines(
                f'{{"id": "{start + i}", "contents": "\\"{text[:20]}\\"\\n{text}"}}\n'
                for i, text in enumerate(texts)
            )


def memory_kib(*fields: str) -> dict[str, int]:
    lines = dict(
        line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return {field: int(lines[field].split()[0]) for field in fields}


class Watch(threading.Thread):
    """Once a second: seconds, MiB of RssAnon (what the process holds itself), MiB resident, GiB on disk below `folder`.

    RssAnon leaves out pages of files, which the system may drop. Its peak is looked for more often."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.peak_kib, self.curve, self.over = folder, 0, [], threading.Event()

    def run(self) -> None:
        began = time.perf_counter()
        while not self.over.wait(0.02):
            anon, resident = memory_kib("RssAnon", "VmRSS").values()
            self.peak_kib = max(self.peak_kib, anon)
            if (seconds := time.perf_counter() - began) > len(self.curve):
                self.curve.append(
                    (round(seconds), round(anon / 1024), round(resident / 1024), on_disk(self.folder))
                )


def on_disk(folder: Path) -> float:
    """GiB of blocks of files below the folder, which may come and go meanwhile."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += 512 * os.stat(Path(place, name)).st_blocks
    return round(size / 2**30, 2)


def watched(work, folder: Path) -> dict[str, Any]:
    """Run in a process of its own: what `work` returns, its seconds, memory (MiB) and disk, over time at 40 places."""
    before = memory_kib("RssAnon")["RssAnon"]
    watch = Watch(folder)
    watch.start()
    load = os.getloadavg()[0]
    began, cpu = time.perf_counter(), time.process_time()
    found = work(folder)
    spent = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    watch.over.set()
    watch.join()
    places = np.unique(np.linspace(0, max(len(watch.curve) - 1, 0), 40).astype(int))
    return (
        found
        | spent
        | {
            "own_mib_before": before / 1024,
            "own_mib_peak": watch.peak_kib / 1024,
            # Not ru_maxrss, which a process inherits from the one that started it.
            "resident_mib_peak": memory_kib("VmHWM")["VmHWM"] / 1024,
            "disk_gib_peak": max((disk for *_, disk in watch.curve), default=None),
            "curve": [watch.curve[i] for i in places if watch.curve],
            "load": [load, os.getloadavg()[0]],
        }
    )


def build(folder: Path) -> dict[str, Any]:
    made = build_bm25(folder / "corpus.jsonl", folder / "index")
    size = sum(path.stat().st_size for path in (folder / "index").iterdir())
    return {name: made[name] for name in ("documents", "words", "postings")} | {
        "corpus_mib": (folder / "corpus.jsonl").stat().st_size / 2**20,
        "index_mib": size / 2**20,
    }


def search(folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    retriever = open_bm25(folder / "index")
    opened = time.perf_counter() - began
    rng = random.Random(0)
    passages = [rng.randrange(len(retriever.documents)) for _ in range(200 + 10 * 64)]
    queries = [" ".join(rng.sample(retriever.documents[i].text.split(), 12)) for i in passages]
    single, batches = [], []
    for query in queries[:200]:
        began = time.process_time()
        retriever.search([query], 3)
        single.append(1e3 * (time.process_time() - began))
    for start in range(200, len(queries), 64):
        began = time.process_time()
        retriever.search(queries[start : start + 64], 3)
        batches.append(1e3 * (time.process_time() - began))
    return {
        "open_seconds": opened,
        "single_ms": dict(zip(("p50", "p95"), np.percentile(single, (50, 95)).tolist(), strict=True)),
        "batch_64_ms": dict(zip(("p50", "p95"), np.percentile(batches, (50, 95)).tolist(), strict=True)),
    }


def search_all(folder: Path) -> dict[str, Any]:
    """The same with every document's score added up, as bm25s does."""
    retriever = open_bm25(folder / "index")
    rng = random.Random(0)
    times = []
    for _ in range(20):
        text = retriever.documents[rng.randrange(len(retriever.documents))].text
        found = [retriever._vocabulary.get(word) for word in words(" ".join(rng.sample(text.split(), 12)))]
        postings, began = retriever._postings, time.process_time()
        scores = np.zeros(postings.n_documents, np.float32)
        for term in found:
            scores[postings.indices[postings.slice(term)]] += postings.data[postings.slice(term)]
        np.argpartition(scores, -3)
        times.append(1e3 * (time.process_time() - began))
    return {"single_ms": dict(zip(("p50", "p95"), np.percentile(times, (50, 95)).tolist(), strict=True))}


PHASES = {"build": build, "search": search, "search_all": search_all}


def measure_size(n: int, scratch: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        write_passages(Path(name, "corpus.jsonl"), n)
        found = {}
        for phase in PHASES:
            command = [sys.executable, __file__, "--phase", phase, "--folder", name]
            found[phase] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            print(n, phase, found[phase], flush=True)
        return found


def extrapolated(small: dict, large: dict, n: int) -> dict[str, float]:
    """To n passages, from two sizes: by straight lines through both; the number of words by a power law."""
    (a, b) = (run["build"]["documents"] for run in (small, large))

    def line(phase: str, *keys: str) -> float:
        y, z = small[phase], large[phase]
        for key in keys:
            y, z = y[key], z[key]
        return z + (z - y) / (b - a) * (n - b)

    words_small, words = (run["build"]["words"] for run in (small, large))
    more_words = words * (n / b) ** (np.log(words / words_small) / np.log(b / a)) - words
    build_mib = large["build"]["own_mib_peak"] + (150 * more_words + 12 * (n - b)) / 2**20
    return {
        "index GiB": line("build", "index_mib") / 1024,
        "build, CPU minutes": line("build", "cpu_seconds") / 60,
        "build, own memory GiB": build_mib / 1024,
        "search, own memory GiB": line("search", "own_mib_peak") / 1024,
        "one query, CPU ms p50": line("search", "single_ms", "p50"),
        "one query, CPU ms p95": line("search", "single_ms", "p95"),
        "64 queries, CPU ms p50": line("search", "batch_64_ms", "p50"),
        "one query with all scores, CPU ms p50": line("search_all", "single_ms", "p50"),
    }


# ---- report -------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "| " + " | ".join(rows[0]) + " |",
        "|" + " --- |" * len(rows[0]),
        *("| " + " | ".join(map(str, row.values())) + " |" for row in rows),
    ]


def render(found: dict[str, Any]) -> str:
    lines = [
        "# Retrieval",
        "",
        "Made by `benchmarks/retrieval.py`; provenance in [retrieval.json](retrieval.json).",
    ]
    if recall := found.get("recall"):
        rows = [
            {"benchmark": row["benchmark"], "query": row["query"], "questions": row["questions"]}
            | {f"recall@{k}": f"{row[str(k)]:.3f}" for k in CUTS}
            for row in recall["rows"]
        ]
        lines += ["", "## Recall of BM25", ""]
        lines += [
            f"Mean share of a question's gold paragraphs found, over {recall['passages']:,} passages: all paragraphs of "
            "these questions, gold and distracting, so this is easier than all of Wikipedia. With the question as query, "
            "the k best passages count; the gold-title searcher asks for each gold title in turn and reads k passages "
            f"each time (at most {TURN_BUDGET} searches), which bounds what a searching agent could read.",
            "",
            *table(rows),
        ]
    if scale := found.get("scale"):
        sizes = scale["sizes"]
        rows = [
            {
                "passages": f"{run['build']['documents']:,}",
                "words": f"{run['build']['words']:,}",
                "postings": f"{run['build']['postings'] / 1e6:.1f} M",
                "corpus MiB": f"{run['build']['corpus_mib']:.0f}",
                "index MiB": f"{run['build']['index_mib']:.0f}",
                "build CPU s": f"{run['build']['cpu_seconds']:.0f}",
                "build own / resident MiB": f"{run['build']['own_mib_peak']:.0f} / {run['build']['resident_mib_peak']:.0f}",
                "search own / resident MiB": f"{run['search']['own_mib_peak']:.0f} / {run['search']['resident_mib_peak']:.0f}",
                "open s": f"{run['search']['open_seconds']:.2f}",
                "1 query ms": "{p50:.1f} / {p95:.1f}".format(**run["search"]["single_ms"]),
                "64 queries ms": "{p50:.0f} / {p95:.0f}".format(**run["search"]["batch_64_ms"]),
                "1 query, all scores, ms": "{p50:.1f} / {p95:.1f}".format(**run["search_all"]["single_ms"]),
            }
            for run in sizes
        ]
        lines += ["", "## A BM25 index on disk", ""]
        before = sizes[-1]["search"]["own_mib_before"]
        lines += [
            f"Made-up passages of {WORDS_PER_PASSAGE} words, whose frequencies follow Zipf's law and whose vocabulary grows "
            "as that of text does; queries of 12 words drawn from a passage, 3 results, none asked twice. Each phase is a "
            "process of its own; times are CPU time of one thread with the index in the page cache (p50 / p95). Own memory "
            "is the peak of RssAnon, of which Python and its libraries are "
            f"{before:.0f} MiB before any work; resident memory is the peak of RSS and counts pages of the mapped index "
            "too, which the system takes back when it needs them. The last column adds up the scores of all documents, as "
            "bm25s does, instead of leaving out those that cannot be among the best.",
            "",
            *table(rows),
        ]
        if len(sizes) > 1:
            guess = extrapolated(sizes[0], sizes[-1], WIKIPEDIA)
            lines += [
                "",
                f"Extrapolated to Wikipedia's {WIKIPEDIA:,} passages (not measured) by straight lines through the smallest "
                "and the largest size. Memory of the build is that of the largest size, and 150 bytes for each word and 12 "
                "for each passage more; the number of words grows by a power law through both sizes. A machine whose free "
                "memory is below the index's size reads from disk besides.",
                "",
                *table(
                    [
                        {"": name, "estimate": f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"}
                        for name, value in guess.items()
                    ]
                ),
            ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--passages", type=int, nargs="*", default=[])
    parser.add_argument(
        "--scratch", type=Path, default=None, help="where the made-up corpora go (about 2 GB a million)"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        print(json.dumps(watched(PHASES[options.phase], options.folder)))
        return
    record = options.out / "retrieval.json"
    found = json.loads(record.read_text()) if record.is_file() else {}
    provenance = {"versions": versions(), "hardware": hardware(), **git_state()}
    if options.data:
        found["recall"] = measure_recall(options.data) | {"provenance": provenance}
    if options.passages:
        sizes = [measure_size(n, options.scratch) for n in sorted(options.passages)]
        found["scale"] = {"sizes": sizes, "provenance": provenance}
    write_json(record, found)
    report = render(found)
    write_atomically(options.out / "retrieval.md", lambda part: part.write_text(report, encoding="utf-8"))
    print(report)


if __name__ == "__main__":
    main()
