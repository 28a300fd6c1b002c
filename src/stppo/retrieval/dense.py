"""Dense retrieval: a Hugging Face encoder, as E5 (Wang et al. 2022) or as its own folder says, and a FAISS
index on disk."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from stppo.checks import install, whole_number
from stppo.files import content_hash, parse_json
from stppo.retrieval.documents import Document, scan_corpus
from stppo.retrieval.index_files import fingerprint, new_folder, open_corpus, read_manifest, write_manifest

try:
    import faiss
except ImportError as error:
    raise ImportError(f"dense retrieval needs FAISS: {install('retrieval')}") from error

KINDS = ("flat", "hnsw")
_VECTORS, _REQUEST = "vectors.faiss", "request.json"
_NEIGHBOURS, _EF_CONSTRUCTION, _EF_SEARCH = 32, 200, 128  # of HNSW
_SORTED_TOGETHER = 64  # batches whose texts are sorted by length, so that little is padding
# Of files before sentence-transformers 5.4.
_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


@dataclass(frozen=True, eq=False)
class Encoder:
    """Texts to unit vectors: last hidden states, averaged over the tokens that are no padding or of the first
    token, divided by their norm.

    model: a Hugging Face name or a folder of `save_pretrained`, with its tokenizer. Where it has the files of
    sentence-transformers (`modules.json`), their pooling is used.
    query_prefix, passage_prefix: what the model was trained with. None: the prompts that its files name, else
    E5's; give empty ones to a model without prompts.
    max_tokens: longer texts are cut.
    device: of torch; "auto" takes a GPU where there is one and computes in half precision there.

    ValueError names a field that is wrong, or a model that cannot be loaded and why.
    """

    model: str
    query_prefix: str | None = None
    passage_prefix: str | None = None
    max_tokens: int = 256
    batch_size: int = 64
    device: str = "auto"

    def __post_init__(self) -> None:
        whole_number(self, "max_tokens", "batch_size")

    @cached_property
    def _stated(self) -> tuple[str, dict[str, str]]:
        """What the model's own files say: how states are pooled, and prompts by name."""
        modules = self._file("modules.json")
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules or ()]
        if other := set(kinds) - {"Transformer", "Pooling", "Normalize"}:
            raise ValueError(f"its module {min(other)} is not supported here, only Pooling and Normalize are")
        pooling = "mean"
        for module in (modules[i] for i, kind in enumerate(kinds) if kind == "Pooling"):
            found = self._file(f"{module['path']}/config.json") or {}
            old = "+".join(k for k, on in found.items() if k.startswith("pooling_mode_") and on)
            pooling = found.get("pooling_mode", _POOLINGS.get(old, old))
            if pooling not in _POOLINGS.values() or found.get("include_prompt") is False:
                said = f"by {pooling or 'nothing'} and include_prompt={found.get('include_prompt')}"
                raise ValueError(f"it pools {said}; supported here are mean and cls, with the prompt")
        prompts = (self._file("config_sentence_transformers.json") or {}).get("prompts") or {}
        return pooling, {str(name): str(prompt) for name, prompt in prompts.items() if prompt}

    def _file(self, name: str) -> Any:
        """Content of one of the model's JSON files; None where it has none of that name."""
        from transformers.utils import cached_file

        path = cached_file(self.model, name, _raise_exceptions_for_missing_entries=False)
        return None if path is None else parse_json(Path(path).read_text(encoding="utf-8"))

    @property
    def prefixes(self) -> tuple[str, str]:
        """What stands before queries, and before passages."""
        stated = self._loaded[3][1]
        passage = stated.get("passage", stated.get("document", ""))
        query, passage = (stated.get("query", ""), passage) if stated else ("query: ", "passage: ")
        return (
            query if self.query_prefix is None else self.query_prefix,
            passage if self.passage_prefix is None else self.passage_prefix,
        )

    @property
    def version(self) -> str | None:
        """Hash of the model's folder, or its commit on the hub; None where it has neither."""
        return content_hash(self.model) if Path(self.model).is_dir() else self._loaded[2].config._commit_hash

    @cached_property
    def _loaded(self) -> tuple[Any, Any, Any, tuple[str, dict[str, str]]]:
        import torch
        from transformers import AutoModel, AutoTokenizer

        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            stated = self._stated
            tokenizer = AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
            dtype = torch.float16 if device.startswith("cuda") else torch.float32
            network, found = AutoModel.from_pretrained(
                self.model,
                dtype=dtype,
                attn_implementation="sdpa",
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
            # A head that only training used is no part of the encoder; a pooler is not read.
            if missing := [name for name in found["missing_keys"] if not name.startswith("pooler.")]:
                raise ValueError(f"it lacks {min(missing)}")
            network = network.to(device).eval()
        except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ValueError(
                f"model {self.model} cannot be loaded on {device} ({reason}); give a folder of "
                "save_pretrained or a Hugging Face name (`hf download NAME`; after `hf auth login` where its "
                "licence must be accepted)"
            ) from error
        return torch, tokenizer, network, stated

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """(texts, size) float32, each row of norm 1."""
        return self._encode([self.prefixes[0] + text for text in texts])

    def passages(self, documents: Sequence[Document]) -> np.ndarray:
        """(documents, size) float32, each row of norm 1; title and text as Search-R1's contents."""
        return self._encode([self.prefixes[1] + document.contents for document in documents])

    @property
    def size(self) -> int:
        """Length of a vector."""
        return self._loaded[2].config.hidden_size

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        torch, tokenizer, network, (pooling, _) = self._loaded
        vectors = np.empty((len(texts), self.size), np.float32)
        order = np.argsort([len(text) for text in texts], kind="stable")
        for start in range(0, len(texts), self.batch_size):
            rows = order[start : start + self.batch_size]
            fed = tokenizer(
                [texts[i] for i in rows],
                padding=True,
                truncation=True,
                max_length=self.max_tokens,
                return_tensors="pt",
            ).to(network.device)
            with torch.inference_mode():
                states = network(**fed).last_hidden_state.float()
            mask = fed["attention_mask"].unsqueeze(-1)
            if pooling == "mean":
                pooled = (states * mask).sum(1) / mask.sum(1)
            else:  # the first token that is no padding
                pooled = states[torch.arange(len(rows)), fed["attention_mask"].argmax(1)]
            vectors[rows] = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        return vectors


class DenseRetriever:
    """The documents whose vectors have the largest inner product with the query's.

    Flat search is exact and reads all vectors for each batch of queries; HNSW is approximate and reads few.
    """

    def __init__(self, documents: Sequence[Document], encoder: Encoder, index: Any) -> None:
        self.documents, self._encoder, self._index = documents, encoder, index

    def search(self, queries: Sequence[str], top_k: int) -> list[list[tuple[Document, float]]]:
        """Best `top_k` documents per query with their inner products (cosines), best first."""
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        if not queries:
            return []
        scores, numbers = self._index.search(self._encoder.queries(queries), min(top_k, len(self.documents)))
        return [
            [(self.documents[i], score) for score, i in zip(*row, strict=True) if i >= 0]
            for row in zip(scores.tolist(), numbers.tolist(), strict=True)
        ]


def open_dense(
    folder: str | Path, corpus: str | Path | None = None, device: str = "auto", batch_size: int = 64
) -> DenseRetriever:
    """A retriever over an index of `build_dense`; flat vectors are memory-mapped, an HNSW graph is read into
    memory.

    corpus: where the corpus is now, if it moved. Errors as in `read_manifest`, `open_corpus` and `Encoder`.
    """
    manifest = read_manifest(folder)
    documents = open_corpus(folder, manifest, corpus)
    encoder = Encoder(**manifest["encoder"], device=device, batch_size=batch_size)
    if manifest.get("encoder_version", encoder.version) != encoder.version:
        raise ValueError(f"{folder}: {encoder.model} is not what it was made with; index it again")
    flags = faiss.IO_FLAG_MMAP_IFC if manifest["kind"] == "flat" else 0
    index = faiss.read_index(str(Path(folder) / _VECTORS), flags)
    if manifest["kind"] == "hnsw":
        index.hnsw.efSearch = _EF_SEARCH
    if index.d != encoder.size or index.ntotal != len(documents):
        raise ValueError(
            f"{folder}: {index.ntotal} vectors of size {index.d}, but {encoder.model} gives size "
            f"{encoder.size} and the corpus has {len(documents)} documents; index it again"
        )
    return DenseRetriever(documents, encoder, index)


def build_dense(
    corpus: str | Path,
    out: str | Path,
    encoder: Encoder,
    kind: str = "flat",
    untitled: str = "error",
    progress: bool = False,
) -> dict[str, Any]:
    """Encode a Search-R1 corpus into the folder `out`; returns its manifest.

    kind: "flat" or "hnsw". Memory and disk: 4 bytes × documents × vector size (HNSW: 256 bytes a document
    more). Vectors already computed are kept in `OUT.partial`, so an interrupted run goes on where it was.

    Errors as in `read_corpus`, `Encoder` and `new_folder`.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    out = Path(out)
    with new_folder(out) as folder:
        query_prefix, passage_prefix = encoder.prefixes
        described = {
            "model": encoder.model,
            "query_prefix": query_prefix,
            "passage_prefix": passage_prefix,
            "max_tokens": encoder.max_tokens,
        }
        facts = {"untitled": untitled, "encoder": described, "encoder_version": encoder.version}
        partial = out.with_name(f"{out.name}.partial")
        request = json.dumps({**facts, "corpus": fingerprint(corpus)})
        if not (partial / _REQUEST).is_file() or (partial / _REQUEST).read_text() != request:
            # Of another model or corpus, or killed before its first vector.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / _REQUEST).write_text(request)
        offsets = _write_vectors(corpus, partial / "vectors.f32", encoder, untitled, progress)
        vectors = np.memmap(partial / "vectors.f32", np.float32, "r", shape=(len(offsets) - 1, encoder.size))
        if kind == "flat":
            index = faiss.IndexFlatIP(encoder.size)
        else:
            index = faiss.IndexHNSWFlat(encoder.size, _NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction = _EF_CONSTRUCTION
        step = 10_000
        blocks = range(0, len(vectors), step)
        for start in tqdm(blocks, desc="index", unit="block", disable=not progress, leave=False):
            index.add(np.ascontiguousarray(vectors[start : start + step]))
        faiss.write_index(index, str(folder / _VECTORS))
        manifest = write_manifest(folder, corpus, offsets, kind=kind, vector_size=encoder.size, **facts)
    shutil.rmtree(partial)
    return manifest


def _write_vectors(
    corpus: str | Path, path: Path, encoder: Encoder, untitled: str, progress: bool
) -> np.ndarray:
    """Append the vectors that `path` lacks; returns where each document begins, then the corpus's size."""
    row = encoder.size * 4
    offsets: list[int] = []
    block = encoder.batch_size * _SORTED_TOGETHER
    with open(path, "ab") as file:
        done = file.tell() // row
        file.truncate(done * row)  # a row that was cut off
        entries = scan_corpus(corpus, untitled)
        with tqdm(
            total=os.path.getsize(corpus), desc="encode", unit="B", unit_scale=True, disable=not progress
        ) as bar:
            while found := list(islice(entries, block)):
                first = len(offsets)
                offsets += [offset for offset, _ in found]
                new = [document for _, document in found[max(done - first, 0) :]]
                if new:
                    file.write(encoder.passages(new).tobytes())
                bar.update(offsets[-1] - bar.n)
            bar.update(os.path.getsize(corpus) - bar.n)
    return np.array([*offsets, os.path.getsize(corpus)], np.int64)
