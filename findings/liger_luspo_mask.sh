#!/usr/bin/env bash
# Guessed: what attention_mask leaves out of a completion, as the passages that a tool returned and the padding, has no gradient under any loss_type of
# Liger's GRPO loss.
# So is: under "luspo" it is trained as if the policy had written it, at the default level "token". At the level "sequence", which suits luspo, the KL
# penalty, on by default, still reaches it; without one nothing does. The other seven loss types keep to the mask. liger-kernel 0.8.5.
# Why it matters: at the defaults a search agent learns to write passages, and padding.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 numpy
  "$FINDINGS_VENV/bin/pip" install --quiet --no-deps liger-kernel==0.8.5 # triton is for its kernels, not for this loss
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

torch.manual_seed(0)
hidden, head = torch.randn(4, 6, 8, requires_grad=True), torch.randn(11, 8)
tokens, advantages = torch.randint(11, (4, 6)), torch.tensor([1.0, -1.0, 0.5, -0.5])
mask = torch.ones(4, 6)
mask[:, 2:4] = 0  # a passage
mask[1, 5] = 0  # padding
old = (hidden @ head.T).log_softmax(-1).gather(-1, tokens[..., None])[..., 0].detach()
reference = old + 0.3 * torch.randn(4, 6)


def on_masked(loss_type, level, beta):
    """The gradient's length on masked tokens, as a share of its length on the policy's own."""
    loss = LigerFusedLinearGRPOLoss(loss_type=loss_type, importance_sampling_level=level, beta=beta, max_completion_length=8, compiled=False)
    value, _ = loss(hidden, head, tokens, mask, advantages, ref_per_token_logps=reference, old_per_token_logps=old)
    (gradient,) = torch.autograd.grad(value, hidden)
    return float(gradient[mask == 0].norm() / gradient[mask == 1].norm())


print("liger-kernel", version("liger-kernel"))
others = {name: on_masked(name, "token", 0.04) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")}
print("masked tokens' gradient over the others', level token, beta .04:", others)
luspo = {(level, beta): round(on_masked("luspo", level, beta), 4) for level in ("token", "sequence") for beta in (0.0, 0.04)}
print("luspo:", luspo)
if any(others.values()) or luspo["token", 0.0] < 0.5 or not 0 < luspo["sequence", 0.04] < 0.1 or luspo["sequence", 0.0]:
    sys.exit("CHANGED: luspo now keeps to the mask, or another loss type does not")
PYTHON
