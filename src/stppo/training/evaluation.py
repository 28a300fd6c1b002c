"""Any checkpoint on any benchmarks: played, scored, written down benchmark by benchmark (`stppo
evaluate`)."""

import dataclasses
import hashlib
import itertools
import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stppo.config.files import Config
from stppo.config.identity import data_section, fingerprint, world_section
from stppo.config.loading import load
from stppo.config.provenance import environment, other_torch, versions
from stppo.files import parse_json, read_yaml, write_atomically, write_json
from stppo.policy.compiled import choose_kernels
from stppo.policy.compute import place, resolve_device
from stppo.policy.policy import check_vocabulary, load_policy, load_tokenizer
from stppo.policy.weights import weights_of
from stppo.record.ownership import FolderLock
from stppo.record.schema import (
    BENCHMARK_COLUMNS,
    BENCHMARKS_FILE,
    BENCHMARKS_TABLE_FILE,
    CONFIG_FILE,
    POLICY_DIR,
    RESULT_FILE,
    RUN_FILE,
    TRAJECTORIES_FILE,
)
from stppo.rollout.engines import make_rollout
from stppo.rollout.rollout import Sampler
from stppo.training.metrics import trajectory_records
from stppo.world.benchmark_world import CONTEXTS, BenchmarkWorld
from stppo.world.datasets import FILES
from stppo.world.environment import Episode
from stppo.world.protocol import Question
from stppo.world.rewards import best_constant, score, search_r1_em
from stppo.world.scripted import World

log = logging.getLogger(__name__)

Decoding = Literal["greedy", "sampled"]
DECODINGS: tuple[Decoding, ...] = ("greedy", "sampled")


def evaluate_checkpoint(
    checkpoint: str | Path,
    config: Config,
    out: Path,
    decodings: Sequence[Decoding] = ("greedy",),
    questions: int | None = None,
    seed: int = 0,
    trajectories: int = 3,
    progress: bool = True,
    trained_on: Config | None = None,
) -> list[dict[str, Any]]:
    """Play the test questions of the config's world with a checkpoint; returns the rows
    (`BENCHMARK_COLUMNS`).

    checkpoint: a folder that `save_pretrained` wrote (a warm start, a run's `policy`), a run folder, or a hub
    name.
    config: composed; its `world`, `rollout`, `training.device` and `training.precision` count. The world's
    benchmarks are played one after the other.
    out: gets BENCHMARK/DECODING/result.json and trajectories.json as soon as each is done, then
    `benchmarks.json` (all rows, with provenance) and `benchmarks.csv`. What is there already is not played
    again.
    questions: most questions per benchmark, a sample chosen by `seed`; None takes all. seed: of sampling too.
    trajectories: how many are kept per benchmark, for the viewer.
    trained_on: config of the training (default: that of the run folder). Questions of a file, which may serve
    training too, that it trained on are left out and counted in the log; where its world divides real
    questions by gold title, also those whose passages it trained on.

    ValueError or OSError of one line for whatever is missing or does not fit; finished benchmarks stay.
    """
    if unknown := [name for name in decodings if name not in DECODINGS]:
        raise ValueError(f"decoding must be of {', '.join(DECODINGS)}, got {unknown[0]!r}")
    folder = _policy_folder(checkpoint)
    # The checkpoint is the policy: the sizes of the config's own limit nothing here.
    loaded = load(config | {"policy": config["policy"] | {"pretrained": str(folder)}})
    settings, world = loaded.settings, loaded.world
    test = _unseen(world.questions("test"), trained_on or _config_of(checkpoint), config["world"])
    asked = sample_of_each(test, questions, seed)
    policy = load_policy(folder, settings.policy.attention)
    reads = find_tokenizer(folder, world)
    check_vocabulary(policy, reads)
    place(policy, resolve_device(settings.training.device), settings.training.precision)
    choose_kernels(policy, settings.training.kernels)
    place_of = ("benchmark", "records", "cache_dir")  # the questions themselves count
    played = {k: v for k, v in world_section(config).items() if k not in place_of}
    shared = {
        "weights": weights_of(folder, policy),
        "world": played,
        **data_section({"world": played, "policy": {}}),
        "max_tokens": settings.rollout.max_tokens,
        "precision": settings.training.precision,
    }
    parts = []
    for (benchmark, chosen), decoding in itertools.product(asked.items(), decodings):
        identity = {**shared, "questions": _hash(map(repr, chosen)), "decoding": decoding}
        identity |= {"seed": seed} if decoding == "sampled" else {}
        parts.append((out / benchmark / decoding, benchmark, decoding, fingerprint(identity)))
    _say_other_torch(Path(checkpoint) / RUN_FILE)
    with FolderLock(out):
        rows = {part: row for part, *_, made_for in parts if (row := _finished(part, made_for))}
        about = {
            "checkpoint": str(checkpoint),
            "weights": shared["weights"],
            "world": config["world"],
            "rollout": dataclasses.asdict(settings.rollout),
            "precision": settings.training.precision,
            "seed": seed,
            "environment": environment(),
        }
        if len(rows) < len(parts):
            sampler = make_rollout(world.environment, reads, settings.rollout, policy).for_evaluation()
            try:
                for part, benchmark, decoding, made_for in parts:
                    if part not in rows:
                        what, some = (part, benchmark, decoding), asked[benchmark]
                        rows[part] = _play(
                            sampler, policy, some, what, seed, trajectories, made_for, progress
                        )
                        write_results(out, about, [rows[p] for p, *_ in parts if p in rows])
            except (OSError, RuntimeError, FloatingPointError) as cause:
                kept = (
                    f"{len(rows)} of {len(parts)} results are in {out}; the same command goes on from there"
                )
                error = cause
                if isinstance(cause, torch.OutOfMemoryError):
                    error = (
                        "GPU memory ran out: lower rollout.batch_size (or max_num_seqs), or use "
                        "training.precision=bfloat16"
                    )
                kind = OSError if isinstance(cause, OSError) else ValueError
                raise kind(f"{error}; {kept}") from cause
            finally:
                sampler.close()
        write_results(out, about, found := [rows[part] for part, *_ in parts])
        return found


def replies_of(out: Path) -> pd.DataFrame:
    """Every reply that an evaluation's folder holds: benchmark, decoding, id (of the question), reply, em (0
    or 1), searches."""
    parts = [
        pd.DataFrame(parse_json(file.read_bytes())["questions"]).assign(
            benchmark=file.parts[-3], decoding=file.parts[-2]
        )
        for file in sorted(out.glob(f"*/*/{RESULT_FILE}"))
    ]
    return pd.concat(parts, ignore_index=True)


def summarise(episodes: Sequence[Episode], without_search: Sequence[Episode] = ()) -> dict[str, float]:
    """`BENCHMARK_MEANS` of finished episodes, each with its standard error over questions (`_se`).

    without_search: the same questions where every search found nothing; without them that column is left out.

    The questions count as a sample of those that could have been asked; standard errors are NaN for a single
    one."""
    turns = [float(len(e.turns)) for e in episodes]
    questions = [e.question for e in episodes]
    constant = best_constant(questions)
    per_question = {
        "em": [score(e.question, e.answer) for e in episodes],
        "search_r1_em": [search_r1_em(e) for e in episodes],
        "lenient_em": [score(e.question, e.answer, "lenient") for e in episodes],
        "em_constant": [score(question, constant) for question in questions],
        "f1": [score(e.question, e.answer, "f1") for e in episodes],
        "turns": turns,
        "searches": [float(e.n_searches) for e in episodes],
        "valid_format_rate": [count - e.n_invalid for count, e in zip(turns, episodes, strict=True)],
    }
    if without_search:
        per_question["em_without_search"] = [score(e.question, e.answer) for e in without_search]
    ones = [1.0] * len(turns)
    found = {
        name: ratio_and_error(values, turns if name == "valid_format_rate" else ones)
        for name, values in per_question.items()
    }
    return {name: mean for name, (mean, _) in found.items()} | {
        f"{name}_se": error for name, (_, error) in found.items()
    }


def ratio_and_error(values: Sequence[float], sizes: Sequence[float]) -> tuple[float, float]:
    """Sum of values over sum of sizes, and its standard error over the n pairs.

    The error is that of the ratio estimator (Cochran, Sampling Techniques, 3rd ed., eq. 6.13): for sizes of 1
    that of a mean."""
    n, total = len(values), sum(sizes)
    ratio = sum(values) / total
    squares = sum((value - ratio * size) ** 2 for value, size in zip(values, sizes, strict=True))
    return ratio, math.sqrt(squares * n / (n - 1)) / total if n > 1 else math.nan


def write_results(out: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The rows as `benchmarks.json`, with what they depend on, and as `benchmarks.csv`."""
    table = pd.DataFrame(rows, columns=list(BENCHMARK_COLUMNS))
    write_json(out / BENCHMARKS_FILE, {**about, "results": rows})
    write_atomically(out / BENCHMARKS_TABLE_FILE, lambda part: table.to_csv(part, index=False))


def find_tokenizer(folder: Path | str, world: World) -> PreTrainedTokenizerBase:
    """The tokenizer that a checkpoint was trained with: the world's where it has one, else its own.

    Raises ValueError or FileNotFoundError where there is none, or where the world's is another than the
    checkpoint's."""
    theirs = world.tokenizer
    if theirs is not None and Path(folder).is_dir() and not Path(folder, "tokenizer.json").exists():
        return theirs
    own = load_tokenizer(folder)
    if theirs is not None and own.get_vocab() != theirs.get_vocab():
        raise ValueError(
            f"{folder} has another vocabulary than this world; evaluate it on the world it was trained in"
        )
    return own if theirs is None else theirs


def _policy_folder(checkpoint: str | Path) -> str | Path:
    """A run folder's weights are in its `policy`."""
    path = Path(checkpoint)
    if not (path / RUN_FILE).is_file():
        return checkpoint
    if not (path / POLICY_DIR).is_dir():
        raise FileNotFoundError(f"{path} is a run that has not ended: it has no folder `policy` yet")
    return path / POLICY_DIR


def _config_of(checkpoint: str | Path) -> Config:
    """The config of a run folder, {} of any other; ValueError where it is none."""
    file = Path(checkpoint) / CONFIG_FILE
    try:
        found = read_yaml(file) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} cannot be read ({error})") from None
    if not isinstance(found, dict) or not isinstance(found.get("world", {}), dict):
        raise ValueError(f"{file} is no config of a run: its world is no mapping")
    return found


def _say_other_torch(record: Path) -> None:
    """A line of the log where the checkpoint is a run's that another torch made."""
    try:
        said = other_torch(parse_json(record.read_bytes()))
    except (OSError, ValueError, TypeError, AttributeError):  # no run, or a record that nothing here rests on
        return
    if said:
        log.warning("%s: %s", record.parent, said)


def _unseen(asked: list[Question], trained_on: Config, world: Config) -> list[Question]:
    """Without what training has met: other benchmarks may ask for the passages of one divided by gold title,
    and a file has no split that is kept for testing.

    world: the evaluation's, whose files serve where those of the training's config are not here.
    """
    section = trained_on.get("world", {})
    by_title = section.get("split_by") == "gold_title"
    if not section.get("train") or not (by_title or _of_files(section)):
        return asked
    known = {field.name for field in dataclasses.fields(BenchmarkWorld)}
    known.discard("retriever")  # the file's code
    fields = {name: value for name, value in section.items() if name in known}
    files = ["records", "corpus"]
    if not section.get("only_in_corpus"):  # a corpus that chooses no questions is not needed
        fields["corpus"], files = CONTEXTS, ["records"]
    try:
        kept = BenchmarkWorld(**fields).unseen(asked)
    except ValueError as error:
        raise ValueError(f"the world of the training's {CONFIG_FILE}: {error}") from error
    except OSError as error:
        here = {name: world[name] for name in files if world.get(name) is not None}
        try:
            kept = BenchmarkWorld(**fields | here).unseen(asked)
        except (OSError, ValueError):  # of a file with other records, too
            log.warning("what training has met cannot be told and is asked too: %s", error)
            return asked
    if len(kept) < len(asked):
        log.warning(
            "%d of %d questions are left out: training asked them, or for a passage that they need",
            len(asked) - len(kept),
            len(asked),
        )
    if not kept:
        raise ValueError("world.benchmark: training has met every question, or a passage that it needs")
    return kept


def _of_files(world: Config) -> bool:
    """Whether a world of benchmarks reads records of a file; those of the hub and of folders have splits."""
    records = world.get("records")
    places = records.values() if isinstance(records, dict) else [records]
    return any(isinstance(place, str) and Path(place).suffix in FILES for place in places) and (
        world.get("_target_") == "stppo.world.BenchmarkWorld"
    )


def sample_of_each(asked: list[Question], most: int | None, seed: int) -> dict[str, list[Question]]:
    """Questions by benchmark, of each at most so many, chosen by `seed` and in their order; None takes
    all."""
    groups: dict[str, list[Question]] = defaultdict(list)
    for question in asked:
        groups[question.source or "synthetic"].append(question)
    if most is None:
        return dict(groups)
    drawn = {
        name: sorted(random.Random(f"{name} {seed}").sample(range(len(group)), min(most, len(group))))
        for name, group in groups.items()
    }
    return {name: [groups[name][i] for i in places] for name, places in drawn.items()}


def _finished(part: Path, made_for: str) -> dict[str, Any] | None:
    """The row of a part that is done; ValueError where it belongs to another evaluation."""
    file = part / RESULT_FILE
    if not file.is_file():
        return None
    try:
        result = parse_json(file.read_bytes())
        row, of, said = result["row"], result["made_for"], other_torch(result)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged; delete it to play this part again") from error
    if of != made_for:
        raise ValueError(
            f"{file} belongs to another checkpoint, world, number of questions or setting; choose another "
            "folder with --out"
        )
    log.info("%s is done already", part)
    if said:
        log.warning("%s: %s; delete it to play this part again", file, said)
    return row


def _play(
    sampler: Sampler,
    policy: PreTrainedModel,
    questions: list[Question],
    place: tuple[Path, str, Decoding],
    seed: int,
    trajectories: int,
    made_for: str,
    progress: bool,
) -> dict[str, Any]:
    """One benchmark with one decoding: its row, also written to its folder with the answers and some
    trajectories."""
    folder, benchmark, decoding = place
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    blind, episodes, alone, kept = sampler.without_search(), [], [], []
    with tqdm(
        total=len(questions), desc=f"{benchmark} {decoding}", unit="question", disable=not progress
    ) as bar:
        for some in _chunks(questions, sampler):
            rollout = sampler.collect(policy, some, generator, greedy=decoding == "greedy")
            aside = torch.Generator().manual_seed(seed + len(episodes))
            alone += blind.collect(policy, some, aside, greedy=decoding == "greedy").episodes
            kept += trajectory_records(rollout, sampler.tokenizer, trajectories - len(kept))
            episodes += rollout.episodes
            bar.update(len(some))
            bar.set_postfix(em=f"{sum(score(e.question, e.answer) for e in episodes) / len(episodes):.3f}")
    row = {
        "benchmark": benchmark,
        "decoding": decoding,
        "n_questions": len(questions),
        **summarise(episodes, alone),
        "seconds": round(time.perf_counter() - began, 2),
    }
    replies = [
        {"id": e.question.id, "reply": e.answer, "em": score(e.question, e.answer), "searches": e.n_searches}
        for e in episodes
    ]
    write_json(folder / TRAJECTORIES_FILE, kept)
    write_json(
        folder / RESULT_FILE,
        {"made_for": made_for, "versions": versions(), "row": row, "questions": replies},
    )  # last: it is done
    return row


def _chunks(questions: list[Question], sampler: Sampler) -> Iterator[list[Question]]:
    """What is sampled at once; an engine gets more, for it is handed the weights each time."""
    config = sampler.config
    size = config.batch_size if config.engine == "torch" else 8 * config.max_num_seqs
    for start in range(0, len(questions), size):
        yield questions[start : start + size]


def _hash(texts: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
