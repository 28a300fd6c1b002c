"""A policy whose lower layers stay as they are: what they compute of a batch is computed once.

`policy.trainable_layers: N` trains the top N layers, the norm behind them and an output layer of its own.
Where that is tied to the embeddings it stays frozen with them: it is one matrix with the embeddings, and were
these to move, the states of the frozen layers would change with every update.

The states between both parts travel with a batch (`Trajectories.below`), so that all epochs' updates, the
reference and the critic, whose frozen layers are the policy's own, begin there."""

import copy

import torch
from torch import Tensor, nn
from transformers import GPT2Model, LlamaModel, PreTrainedModel, Qwen2Model

from stppo.policy.compute import body_of, computing, device_of
from stppo.policy.weights import without_adapters
from stppo.trajectories import Trajectories

_ROWS = 16  # computed at once


class _NoPositions(nn.Module):
    """In the place of GPT-2's learned positions, which the frozen part has added already."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


def layers_of(body: nn.Module) -> nn.ModuleList:
    return body.h if isinstance(body, GPT2Model) else body.layers


def freeze_below(policy: PreTrainedModel, trainable: int) -> None:
    """Freeze all but the top `trainable` layers, the last norm and an untied output layer.

    From now on `agent_states` treats this policy's body in two parts. ValueError unless it has more layers
    than that."""
    body = body_of(policy)
    layers = layers_of(body)
    if trainable >= len(layers):
        raise ValueError(
            f"policy.trainable_layers={trainable}: the policy has {len(layers)} layers; give fewer, or null "
            "to train all"
        )
    if len(set(getattr(body.config, "layer_types", None) or ["full_attention"])) > 1:
        raise ValueError("policy.trainable_layers: this policy's layers attend in different ways; use null")
    policy.requires_grad_(False)
    body.frozen_layers = len(layers) - trainable
    for layer in layers[body.frozen_layers :]:
        layer.requires_grad_(True)
    _norm_of(body).requires_grad_(True)
    if not _is_tied(policy):
        policy.get_output_embeddings().requires_grad_(True)


def is_divided(body: nn.Module) -> bool:
    """Whether `freeze_below` has divided this body, or the one it is a copy of."""
    return bool(getattr(body, "frozen_layers", 0))


def parts_of(body: nn.Module) -> tuple[nn.Module, nn.Module]:
    """(frozen, trained) part of a divided body: views that share its layers. The frozen one maps token ids to
    states, the trained one states (as `inputs_embeds`) to what the whole body gives."""
    if (frozen := getattr(body, "shared_trunk", None)) is not None:
        return frozen, body  # a critic's: it has the upper part alone
    frozen, trained = _view(body), _view(body)
    below = body.frozen_layers
    if isinstance(body, GPT2Model):
        frozen.h, trained.h = frozen.h[:below], trained.h[below:]
        frozen.ln_f, trained.wpe = nn.Identity(), _NoPositions()
        del trained.wte
    else:
        frozen.layers, trained.layers = frozen.layers[:below], trained.layers[below:]
        frozen.norm = nn.Identity()
        del trained.embed_tokens
    return frozen, trained


def own_upper_part(body: nn.Module) -> nn.Module:
    """A copy of a divided body's trained part that begins with that body's frozen one, which is shared."""
    frozen, trained = parts_of(body)
    upper = copy.deepcopy(trained)
    upper.__dict__["shared_trunk"] = frozen  # no sub-module: its weights are not this one's
    return upper


def frozen_copy(policy: PreTrainedModel) -> PreTrainedModel:
    """The policy as it is now, frozen: its trained part is copied, the rest is shared."""
    model, body = _view(policy), _view(body_of(policy))
    layers = [
        layer if i < body.frozen_layers else copy.deepcopy(layer).requires_grad_(False)
        for i, layer in enumerate(layers_of(body))
    ]
    names = ("h", "ln_f") if isinstance(body, GPT2Model) else ("layers", "norm")
    norm = copy.deepcopy(_norm_of(body)).requires_grad_(False)
    for name, part in zip(names, (nn.ModuleList(layers), norm), strict=True):
        setattr(body, name, part)
    setattr(model, policy.base_model_prefix, body)
    if not _is_tied(policy):
        model.lm_head = copy.deepcopy(policy.get_output_embeddings()).requires_grad_(False)
    return model


@torch.no_grad()
def states_below(body: nn.Module, batch: Trajectories) -> Tensor:
    """(B, T, H) states that the frozen part of a divided body has at each token; on the batch's device, 0 in
    the padding."""
    frozen, _ = parts_of(body)
    device, out = device_of(body), None
    for rows in torch.argsort(batch.lengths, stable=True).split(_ROWS):
        longest = int(batch.lengths[rows].max())
        with computing(frozen):
            found = frozen(
                input_ids=batch.tokens[rows, :longest].to(device), use_cache=False
            ).last_hidden_state
        if out is None:
            out = torch.zeros(*batch.tokens.shape, found.shape[-1], dtype=found.dtype)
            out = out.to(batch.tokens.device)
        out[rows, :longest] = found.to(out.device)
    return out


def states_above(trained: nn.Module, below: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """(N, H) of what a body's trained part gives at the places (row, column), each (N,), in row-major order,
    of states (b, t, H) below it. In its last layer only keys and values are computed elsewhere, where the
    family allows it."""
    body = without_adapters(trained)
    if not _ends_as_llama(body):
        return trained(inputs_embeds=below, use_cache=False).last_hidden_state[row, column]
    inner, layer = _view(body), body.layers[-1]
    inner.layers, inner.norm = body.layers[:-1], nn.Identity()
    states = inner(inputs_embeds=below, use_cache=False).last_hidden_state
    attention, (b, t, _) = layer.self_attn, states.shape
    normed, size = layer.input_layernorm(states), attention.head_dim
    cosine, sine = body.rotary_emb(states, position_ids=torch.arange(t, device=states.device)[None])
    keys, values = (
        project(normed).view(b, t, -1, size).transpose(1, 2)
        for project in (attention.k_proj, attention.v_proj)
    )
    keys = _rotated(keys, cosine[:, None], sine[:, None])
    found = attention.q_proj(normed[row, column]).view(len(row), -1, size)
    found = _rotated(found, cosine[0, column][:, None], sine[0, column][:, None])
    # The places of each row side by side, as queries; where a row has fewer, queries that nobody reads.
    counts = torch.bincount(row, minlength=b)
    rank = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    queries = found.new_zeros(b, int(counts.max()), *found.shape[1:]).index_put((row, rank), found)
    until = column.new_zeros(queries.shape[:2]).index_put((row, rank), column)
    groups = queries.shape[2] // keys.shape[1]
    read = nn.functional.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.repeat_interleave(groups, 1),
        values.repeat_interleave(groups, 1),
        attn_mask=(torch.arange(t, device=row.device) <= until[:, :, None])[:, None],
        scale=attention.scaling,
    )
    read = read.transpose(1, 2)[row, rank].reshape(len(row), -1)
    found = states[row, column] + attention.o_proj(read)
    found = found + layer.mlp(layer.post_attention_layernorm(found))
    return body.norm(found)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


def _ends_as_llama(body: nn.Module) -> bool:
    """Whether `states_above` knows how this body's last layer computes."""
    config = body.config
    usual = isinstance(body, LlamaModel | Qwen2Model) and config._attn_implementation == "sdpa"
    usual = usual and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    return usual and not config.attention_dropout


def _norm_of(body: nn.Module) -> nn.Module:
    return body.ln_f if isinstance(body, GPT2Model) else body.norm


def _is_tied(policy: PreTrainedModel) -> bool:
    return policy.get_output_embeddings().weight is policy.get_input_embeddings().weight


def _view(module: nn.Module) -> nn.Module:
    """A module of the same class, parameters and sub-modules, of which others can be put in without changing
    `module`."""
    view = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules"):
        view.__dict__[table] = dict(module.__dict__[table])
    return view
