"""Whether an engine's weights, and what it computes with them, follow those that it is handed.

In half precision, kernels alone put more between the log-probs of trainer and engine than an update does, so
weights that stopped arriving would not show in them for a long time. A few numbers of each weight show it at
once."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_NUMBERS = 256  # looked at of each weight
_CHANGED = 10  # of them, from which on an engine cannot answer as before
# Where vLLM puts several weights into one, one below the other.
_PACKED = {
    "q_proj": ("qkv_proj", ()),
    "k_proj": ("qkv_proj", ("q_proj",)),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj")),
    "gate_proj": ("gate_up_proj", ()),
    "up_proj": ("gate_up_proj", ("gate_proj",)),
}


class WeightSync:
    """The weights of one hand-over after another, as an engine of this dtype rounds them.

    Which of them can be found in the engine's model (some are transposed or packed by other rules) is found
    out at the first hand-over, whose log-probs tell that it worked: the engine's weights before it mean
    nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.rows: dict[str, int] = {}
        self.handed: dict[str, Tensor] = {}
        self.settled: dict[str, Tensor] = {}  # of the newest hand-over that was found to have worked
        self.comparable: set[str] | None = None

    def noting(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same names and weights; a few numbers of each are kept."""
        self.handed = {}
        for name, weight in weights:
            if weight.dim():  # a lone number has no rows
                self.rows[name] = len(weight)
                self.handed[name] = _some(weight).to(self.dtype).cpu()
            yield name, weight

    def missing(self, model: nn.Module) -> list[str]:
        """Names of handed weights that the engine's model does not hold, of those that can be compared."""
        held = dict(model.named_parameters())
        equal = {name for name in self.handed if self._holds(held, name)}
        if self.comparable is None:
            self.comparable = equal
        return sorted(self.comparable - equal)

    def changed(self) -> bool:
        """Whether the weights differ from those that were last settled by more than the engine may round
        away."""
        pairs = [(self.settled[name], now) for name, now in self.handed.items() if name in self.settled]
        return sum(int((old != new).sum()) for old, new in pairs) >= _CHANGED

    def _holds(self, held: dict[str, Tensor], name: str) -> bool:
        place, start = name, 0
        path, _, kind = name.rpartition(".")
        outer, _, last = path.rpartition(".")
        if name not in held and last in _PACKED:
            whole, earlier = _PACKED[last]
            place = f"{outer}.{whole}.{kind}"
            start = sum(self.rows.get(f"{outer}.{part}.{kind}", 0) for part in earlier)
        if place not in held:
            return False
        part = held[place][start : start + self.rows[name]]  # a vocabulary may be padded
        if len(part) != self.rows[name]:
            return False
        return torch.equal(_some(part).to(self.dtype).cpu(), self.handed[name])


def _some(weight: Tensor) -> Tensor:
    """Numbers of a weight, evenly spread."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _NUMBERS) | 1]  # odd, or all might stand in one column
