"""Small policies on a CPU by compiled code, `compiled.cpp`: hidden states with their gradients, and decoding.

PyTorch's operators wait for memory at these sizes, and `torch.compile` hardly changes that. Modules,
parameters, optimisers and checkpoints stay the same, and results up to rounding."""

import ctypes
import logging
import weakref
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import GPT2Model, LlamaModel, PreTrainedModel, Qwen2Model

from stppo.policy.compiler import CannotCompile, compiled_library
from stppo.policy.compute import body_of, device_of

log = logging.getLogger(__name__)

Kernels = Literal["auto", "eager"]
SOURCE = Path(__file__).with_suffix(".cpp")
LANES = 16  # floats that the code takes at once
MAX_HIDDEN = 256  # in wider policies matrix products take the time, and PyTorch's are as good


def choose_kernels(policy: PreTrainedModel, wanted: Kernels) -> Literal["eager", "compiled"]:
    """Decide how a policy on its device, and copies of its body, compute from now on; returns what was
    decided.

    "auto" takes compiled code where it can; a line of the log says why a small policy on a CPU cannot have
    it."""
    body = body_of(policy)
    body.compiled = False
    if wanted == "eager" or device_of(body).type != "cpu" or body.config.hidden_size > MAX_HIDDEN:
        return "eager"
    try:
        _require_supported(body)
        _library()
    except CannotCompile as reason:
        log.warning("the policy computes in eager PyTorch, slower and with the same results: %s", reason)
        return "eager"
    body.compiled = True
    return "compiled"


def is_compiled(body: nn.Module) -> bool:
    """Whether `choose_kernels` has found that this body, or the one it is a copy of, has compiled code."""
    return getattr(body, "compiled", False)


def _require_supported(body: nn.Module) -> None:
    """Raise CannotCompile where a body is not what `compiled.cpp` computes."""
    config = body.config
    if type(body) not in (Qwen2Model, LlamaModel, GPT2Model):
        raise CannotCompile(f"{type(body).__name__} is none of Qwen2, Llama and GPT-2")
    for module in body.modules():
        if type(module).__module__.split(".")[0] not in ("torch", "transformers"):
            raise CannotCompile(f"{type(module).__module__}.{type(module).__name__} has no compiled form")
    if getattr(body, "autocast_dtype", None) or getattr(body, "checkpoint_layers", False):
        raise CannotCompile("training.precision=bfloat16 and gradient_checkpointing have no compiled form")
    if any(weight.dtype != torch.float32 for weight in body.parameters()):
        raise CannotCompile("its weights are not float32")
    shape = _shape(body)
    widths = config.hidden_size, shape.inner, *(n * shape.head_size for n in (shape.heads, shape.kv_heads))
    if any(width % LANES for width in widths) or shape.head_size % 2:
        raise CannotCompile(f"widths {widths} are not all multiples of {LANES}")
    if isinstance(body, GPT2Model):
        usual = config.activation_function == "gelu_new" and config.scale_attn_weights
        usual &= not config.scale_attn_by_inverse_layer_idx
        usual &= not (config.resid_pdrop or config.embd_pdrop or config.attn_pdrop)
    else:
        usual = config.hidden_act == "silu" and config.rope_parameters["rope_type"] == "default"
        usual &= set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        usual &= not config.attention_dropout
    if not usual:
        raise CannotCompile("its activation, positions, attention or dropout are unusual ones")


def _library() -> ctypes.CDLL:
    library = compiled_library(SOURCE)
    library.kept_size.restype = ctypes.c_int64
    library.decoder.restype = ctypes.c_void_p
    return library


# ---- a body as the compiled code sees it ----------------------------------------------------------


class _Shape(ctypes.Structure):
    """`Model` in compiled.cpp, without its two tables."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("hidden", "layers", "heads", "kv_heads", "head_size", "inner")),
        *((n, ctypes.c_int64) for n in ("layer_norm", "gated")),
        *(("epsilon", ctypes.c_double), ("cosine", ctypes.c_void_p), ("sine", ctypes.c_void_p)),
    ]


def _shape(body: nn.Module) -> _Shape:
    config, heads = body.config, body.config.num_attention_heads
    gpt2 = isinstance(body, GPT2Model)
    return _Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=heads if gpt2 else config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        inner=(config.n_inner or 4 * config.hidden_size) if gpt2 else config.intermediate_size,
        layer_norm=gpt2,
        gated=not gpt2,
        epsilon=config.layer_norm_epsilon if gpt2 else config.rms_norm_eps,
    )


def _weights(body: nn.Module) -> list[Tensor | None]:
    """In the order of compiled.cpp: token and position embeddings, last norm and its bias, then for each
    layer norm, queries, keys, values, output, norm, gate, up, down, each followed by its bias. Matrices are
    (out, in)."""
    if isinstance(body, GPT2Model):
        found = [body.wte.weight, body.wpe.weight, body.ln_f.weight, body.ln_f.bias]
        for layer in body.h:
            matrices = (layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj)
            o, up, down = (part for m in matrices for part in [(m.weight.t().contiguous(), m.bias)])
            attention = layer.attn.c_attn
            parts = zip(attention.weight.t().contiguous().chunk(3), attention.bias.chunk(3), strict=True)
            found += [layer.ln_1.weight, layer.ln_1.bias, *(x for part in parts for x in part), *o]
            found += [layer.ln_2.weight, layer.ln_2.bias, None, None, *up, *down]
        return found
    found = [body.embed_tokens.weight, None, body.norm.weight, None]
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found += [layer.input_layernorm.weight, None]
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            found += [linear.weight, linear.bias]
        found += [layer.post_attention_layernorm.weight, None]
        for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            found += [linear.weight, linear.bias]
    return found


class _Body:
    """Shape, rotary tables up to `positions`, and weights of a body; they are read where they lie."""

    def __init__(self, body: nn.Module, positions: int) -> None:
        self.shape, self.weights = _shape(body), _weights(body)
        if not isinstance(body, GPT2Model):
            rotary = body.rotary_emb
            angles = torch.arange(positions)[:, None].float() * rotary.inv_freq.float()
            self.cosine = angles.cos() * rotary.attention_scaling
            self.sine = angles.sin() * rotary.attention_scaling
            self.shape.cosine, self.shape.sine = self.cosine.data_ptr(), self.sine.data_ptr()
        embedding = body.get_input_embeddings()
        self.no_gradient = -1 if embedding.padding_idx is None else embedding.padding_idx
        self.arguments = ctypes.byref(self.shape), _pointers(self.weights)


def _pointers(tensors: list[Tensor | None]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


# ---- hidden states --------------------------------------------------------------------------------


class _Memory:
    """A buffer that goes back to a pool, where the next pass finds it: the system takes a while to hand out
    new memory."""

    pool: list[Tensor] = []

    def __init__(self, size: int) -> None:
        fitting = [i for i, memory in enumerate(self.pool) if len(memory) >= size]
        self.floats = self.pool.pop(fitting[-1]) if fitting else torch.empty(size * 5 // 4)

    def __del__(self) -> None:
        del self.pool[:-2]
        self.pool.append(self.floats)


def states_at(body: nn.Module, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What `policy.agent_states` gives, of (B, T) token ids and the (B, T) mask of agent tokens: the states
    (N, H), with graph, from which they were emitted, and their flat positions (N,)."""
    positions = mask.reshape(-1).nonzero().squeeze(1)
    width = tokens.shape[1]
    rows = positions // width
    columns = positions - rows * width - 1
    counts = torch.bincount(rows, minlength=len(tokens))
    lengths = torch.zeros_like(counts).scatter_reduce_(0, rows, columns + 1, "amax")
    seen = _Body(body, width)
    with_graph = torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in seen.weights)
    batch = tokens.contiguous(), lengths, columns, counts
    return _States.apply(seen, batch, with_graph, *seen.weights), positions


class _States(torch.autograd.Function):
    """Only a token that an agent token follows has a part in the result, so rows end before their last
    one."""

    @staticmethod
    def forward(
        ctx, body: _Body, batch: tuple[Tensor, ...], with_graph: bool, *weights: Tensor | None
    ) -> Tensor:
        tokens, lengths, columns, counts = batch
        library = _library()
        out = torch.empty(len(columns), body.shape.hidden)
        kept = None
        if with_graph:
            rows = _at(lengths), _at(counts), ctypes.c_int64(len(lengths))
            size = library.kept_size(*body.arguments, *rows)
            kept = _Memory(size)
            ctx.kept, ctx.body, ctx.batch = kept, body, batch
        library.states(*body.arguments, *_batch(batch), _at(kept and kept.floats), _at(out))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, seed: Tensor) -> tuple[Tensor | None, ...]:
        body, seed = ctx.body, seed.contiguous()
        sizes = [0 if w is None else w.numel() for w in body.weights]
        parts = torch.zeros(sum(sizes)).split(sizes)
        found = [None if w is None else g.view_as(w) for g, w in zip(parts, body.weights, strict=True)]
        arguments = *body.arguments, *_batch(ctx.batch), _at(ctx.kept.floats), _at(seed), _pointers(found)
        _library().states_back(*arguments, ctypes.c_int64(body.no_gradient))
        return None, None, None, *found


def _batch(batch: tuple[Tensor, ...]) -> tuple:
    tokens, lengths, columns, counts = batch
    stride, rows = ctypes.c_int64(tokens.shape[1]), ctypes.c_int64(len(tokens))
    return _at(tokens), stride, _at(lengths), rows, _at(columns), _at(counts)


# ---- scores of tokens -----------------------------------------------------------------------------

MAX_VOCABULARY = 4096  # log-softmaxes of a minibatch are kept whole


def scores_of(head: nn.Linear, states: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Log-prob of each id (N,), entropy and sum of squared probabilities of the distributions that states (N,
    H) lead to; the first two with graph."""
    return _Scores.apply(states.contiguous(), head.weight, ids, temperature)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, ...]:
        sizes = *(ctypes.c_int64(n) for n in (len(states), *weight.shape)), ctypes.c_double(temperature)
        log_softmax = torch.empty(len(states), len(weight))
        chosen, entropy, squares = torch.empty(3, len(states)).unbind()
        given = _at(states), _at(weight), _at(ids), *sizes, _at(log_softmax)
        _library().scores(*given, _at(chosen), _at(entropy), _at(squares))
        # Not the output itself: it refers to ctx, and the cycle would hold a minibatch's memory for long.
        ctx.given, ctx.kept = given, (states, weight, ids, log_softmax, entropy.detach())
        ctx.mark_non_differentiable(squares)
        ctx.set_materialize_grads(False)
        return chosen, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(ctx, d_chosen: Tensor | None, d_entropy: Tensor | None, _) -> tuple[Tensor | None, ...]:
        states, weight, *_, entropy = ctx.kept
        d_chosen = torch.zeros(len(states)) if d_chosen is None else d_chosen.contiguous()
        d_entropy = None if d_entropy is None else d_entropy.contiguous()
        d_states, d_weight = torch.empty_like(states), torch.zeros_like(weight)
        seeds = _at(d_chosen), _at(d_entropy)
        _library().scores_back(*ctx.given, _at(entropy), *seeds, _at(d_states), _at(d_weight))
        return d_states, d_weight, None, None


# ---- decoding -------------------------------------------------------------------------------------


class CompiledKVCache:
    """Keys and values of n slots of at most `room` tokens, and the states of what is appended to them. While
    it lives the weights must not change."""

    def __init__(self, body: nn.Module, n: int, room: int) -> None:
        self.room = -(-room // LANES) * LANES
        self.body = _Body(body, self.room)
        self.decoder = ctypes.c_void_p(_library().decoder(*self.body.arguments))
        weakref.finalize(self, _library().end_decoder, self.decoder)
        shape = self.body.shape
        padded = -(-shape.head_size // LANES) * LANES
        self.size = 2 * shape.layers * shape.kv_heads * padded * self.room
        self.memory = _Memory(n * self.size)
        self.slots, self.past = torch.arange(n), torch.zeros(n, dtype=torch.long)

    def feed(self, chunk: Tensor, mask: Tensor) -> Tensor:
        """Append to each slot the tokens (n, m) that the mask (n, m) leaves, its first ones; returns the
        state (n, H) of each slot's last one, 0 where there is none."""
        n, counts = len(chunk), mask.sum(1)
        if int((self.past + counts).max()) > self.room:
            raise ValueError(f"a slot holds more than {self.room} tokens")
        caches = self.memory.floats.data_ptr() + self.slots * (4 * self.size)
        out = torch.zeros(n, self.body.shape.hidden)
        chunk = chunk.contiguous()
        sizes = ctypes.c_int64(self.room), ctypes.c_int64(n)
        read = _at(chunk), ctypes.c_int64(chunk.shape[1]), _at(counts), _at(self.past), _at(caches)
        _library().extend(self.decoder, *read, *sizes, _at(out))
        self.past = self.past + counts
        return out

    def keep(self, rows: Tensor) -> None:
        """Drop all slots but these."""
        self.slots, self.past = self.slots[rows], self.past[rows]
