"""The gated feed-forward block: its configuration, its module, its weights."""

from __future__ import annotations

import dataclasses

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.models.layers import ACTIVATIONS, Linear
from jaxserve.models.passes import Pass
from jaxserve.models.weights import Piece, Rule, rule


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """``down(activation(gate(x)) * up(x))`` (Shazeer 2020).

    Attributes:
        ffn: inner width.
        activation: a key of ``layers.ACTIVATIONS``.
        bias: on all three maps.
        name: of the block in files, behind ``model.layers.N.``.
    """

    ffn: int
    activation: str = "silu"
    bias: bool = False
    name: str = "mlp"

    @property
    def widest(self) -> int:
        """Numbers of a token's widest activation."""
        return 2 * self.ffn

    @property
    def steady(self) -> bool:
        """See ``DecoderConfig``."""
        return True

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> GatedMLP:
        """The module."""
        return GatedMLP(self, width, dtype=dtype, rngs=rngs)

    def rules(self, width: int, to: str, of: str) -> tuple[Rule, ...]:
        """Every weight: ``to`` and ``of`` are the paths of the layer here and in files, with their dots."""
        of, to, f = f"{of}{self.name}.", f"{to}ffn.", self.ffn
        halves = tuple(((at, at + 1),) for at in range(2))
        gate_up = tuple(
            Piece(f"{of}{name}_proj.weight", (f, width), region=half)
            for name, half in zip(("gate", "up"), halves, strict=True)
        )
        rules = [
            Rule(f"{to}gate_up.kernel", (2, f, width), (None, "ffn", "model"), (gate_up,)),
            rule(f"{to}down.kernel", f"{of}down_proj.weight", (width, f), ("model", "ffn")),
        ]
        if self.bias:
            biases = tuple(
                Piece(f"{of}{name}_proj.bias", (f,), region=half)
                for name, half in zip(("gate", "up"), halves, strict=True)
            )
            rules.append(Rule(f"{to}gate_up.bias", (2, f), (None, "ffn"), (biases,)))
            rules.append(rule(f"{to}down.bias", f"{of}down_proj.bias", (width,), (None,)))
        return tuple(rules)


class GatedMLP(nnx.Module):
    """See ``MLPConfig``; one product gives gate and up."""

    def __init__(self, config: MLPConfig, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.activation = config.activation
        self.gate_up = Linear((width,), (2, config.ffn), bias=config.bias, dtype=dtype, rngs=rngs)
        self.down = Linear((config.ffn,), (width,), bias=config.bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b t d"], run: Pass | None = None) -> Float[Array, "b t d"]:  # noqa: ARG002
        """Applies the block, without the residual; every token costs the same, so the pass does not matter."""
        both = self.gate_up(x)
        return self.down(ACTIVATIONS[self.activation](both[..., 0, :]) * both[..., 1, :])
