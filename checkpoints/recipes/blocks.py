"""Block diffusion as it is trained: noisy copies of a text beside the text itself, and what is to be made of them.

Knows masks of attention, noise and the loss (Arriola et al. 2025, arXiv 2503.09573, for the concatenation; LLaDA2.0 and
2.1 for absolute blocks and token-to-token noise). It does not know what the texts say, nor how weights are moved.

The training pass is the served model's, but for the routed product: it computes every expert and weighs those that
were not chosen with zero, which can be differentiated and costs little where experts are few and small.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from benchmarks.records import kind
from checkpoints.recipes.characters import END, IDS, MASK, VOCABULARY
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.layers import GLUS
from jaxserve.models.moe import Experts, ExpertsConfig
from jaxserve.models.passes import Pass
from jaxserve.models.weights import nest, params_of
from jaxserve.pytree import pytree

# Of blocks: all masked, as generation begins; none masked, as a draft is handed in; the others anything in between.
ALL_MASKED, NONE_MASKED = 0.3, 0.15
# Of blocks: no wrong token among the visible ones; the others up to so many of them.
ALL_RIGHT, MOST_WRONG = 0.4, 0.3
# Of wrong tokens: a like one (a digit for a digit), any other; the rest is a neighbour's, as a slip would leave it.
LIKE, ANY = 0.5, 0.3
# What a visible token that is right counts beside one that has to be found.
KEPT = 0.2


@pytree
class Texts:
    """Texts of ``t`` positions: ids, where the answer begins, and where the block of its end ends."""

    tokens: Int[Array, "b t"]
    first: Int[Array, " b"]
    end: Int[Array, " b"]


@dataclasses.dataclass(frozen=True)
class EveryExpert:
    """An ``ExpertsConfig`` for training."""

    experts: ExpertsConfig

    @property
    def widest(self) -> int:
        """Numbers of a token's widest activation."""
        return self.experts.widest

    def build(self, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> EveryExpertModule:
        """The module, with the weights of the served one."""
        return EveryExpertModule(self.experts, width, dtype=dtype, rngs=rngs)


class EveryExpertModule(Experts):
    """All experts for each token; ``load`` is then the share of choices that fell on each."""

    def __call__(self, x: Float[Array, "b t d"], run: Pass) -> Float[Array, "b t d"]:
        """Applies the block, without the residual."""
        rows, count = x.reshape(-1, x.shape[-1]), len(self.gate_up[...])
        chosen, weights = self.router(rows)
        taken = jax.nn.one_hot(chosen, count)
        self.load = nnx.Intermediate(jnp.mean(taken, axis=(0, 1)))
        inward, outward = self.gate_up[...], self.down[...].swapaxes(1, 2)
        both = (rows @ inward.reshape(-1, x.shape[-1]).T).reshape(len(rows), count, 2, -1)
        inner = GLUS[self.activation](both[:, :, 0], both[:, :, 1]) * jnp.sum(taken * weights[..., None], 1)[..., None]
        y = (inner.reshape(len(rows), -1) @ outward.reshape(-1, x.shape[-1])).reshape(x.shape)
        return y if self.shared is None else y + self.shared(x, run)


def trainable(family: Family) -> nnx.GraphDef[Decoder]:
    """The structure of the family's model with a routed product that has a gradient."""
    layers = (
        dataclasses.replace(layer, ffn=EveryExpert(layer.ffn)) if isinstance(layer.ffn, ExpertsConfig) else layer
        for layer in family.config.layers
    )
    config = dataclasses.replace(family.config, layers=tuple(layers))
    return dataclasses.replace(family, config=config).graphdef(jnp.float32)


def merged(graphdef: nnx.GraphDef[Decoder], leaves: dict[str, Array]) -> Decoder:
    """The module with these leaves, by path."""
    return nnx.merge(graphdef, params_of(nest(leaves)))


def seen(positions: int, block: int) -> np.ndarray:
    """Who sees whom in a text: everybody its own block and those before."""
    of = np.arange(positions) // block
    return of[:, None] >= of


def seen_in_training(positions: int, block: int) -> np.ndarray:
    """The same in a noisy copy and, behind it, the text without its last block, which no noisy block sees.

    A noisy block sees itself and the clean blocks before it.
    """
    of = np.arange(positions) // block
    clean = positions - block
    noisy = np.concatenate([of[:, None] == of, (of[:, None] > of)[:, :clean]], axis=1)
    rest = np.concatenate([np.zeros((clean, positions), bool), seen(clean, block)], axis=1)
    return np.concatenate([noisy, rest])


def _alike() -> tuple[np.ndarray, np.ndarray]:
    """For each id the ids that are of its kind, and how many these are."""
    table, counts = np.zeros((VOCABULARY, VOCABULARY), np.int32), np.ones(VOCABULARY, np.int32)
    table[:] = END
    for character, token in IDS.items():
        others = [IDS[other] for other in kind(character) if other != character]
        table[token, : len(others)], counts[token] = others, len(others)
    return table, counts


_ALIKE, _COUNTS = _alike()


def noised(key: Array, texts: Texts, block: int) -> tuple[Int[Array, "b t"], Float[Array, "b t"]]:
    """A noisy copy, and what each position counts: masks and wrong tokens one, tokens that are right a little.

    Nothing is done to the question, nor behind the block of the answer's end.
    """
    x, (b, t) = texts.tokens, texts.tokens.shape
    draws = jax.random.uniform(key, (5, b, t))
    of_blocks = jax.random.uniform(jax.random.fold_in(key, 1), (4, b, t // block, 1))
    extent, masked, spoilt, wrong = jnp.broadcast_to(of_blocks, (4, b, t // block, block)).reshape(4, b, t)
    at = jnp.arange(t)
    answer = (at >= texts.first[:, None]) & (at < texts.end[:, None])
    share = jnp.where(extent < ALL_MASKED, 1.0, jnp.where(extent < ALL_MASKED + NONE_MASKED, 0.0, masked))
    hidden = answer & (draws[0] < share)
    spoils = jnp.where(spoilt < ALL_RIGHT, 0.0, MOST_WRONG * wrong)
    replaced = answer & ~hidden & (draws[1] < spoils)
    candidates = jnp.asarray(_ALIKE)[x, (draws[2] * jnp.asarray(_COUNTS)[x]).astype(jnp.int32)]
    anything = (draws[2] * (END + 1)).astype(jnp.int32)
    neighbour = jnp.where(draws[3] < 0.5, jnp.roll(x, 1, axis=1), jnp.roll(x, -1, axis=1))
    other = jnp.where(draws[4] < LIKE, candidates, jnp.where(draws[4] < LIKE + ANY, anything, neighbour))
    noisy = jnp.where(hidden, MASK, jnp.where(replaced, other, x))
    return noisy, jnp.where(noisy != x, 1.0, jnp.where(answer, KEPT, 0.0))


def loss(
    leaves: dict[str, Array], graphdef: nnx.GraphDef[Decoder], texts: Texts, key: Array, block: int
) -> tuple[Float[Array, ""], list[Any]]:
    """Mean cross-entropy of the text given a noisy copy, and each layer's share of choices for each expert."""
    b, t = texts.tokens.shape
    noisy, weights = noised(key, texts, block)
    both = jnp.concatenate([noisy, texts.tokens[:, :-block]], axis=1)
    mask: Bool[Array, "n n"] = jnp.asarray(seen_in_training(t, block))
    positions = jnp.broadcast_to(jnp.concatenate([jnp.arange(t), jnp.arange(t - block)]), both.shape)
    model = merged(graphdef, leaves)
    hidden, _ = model(both, jnp.zeros(b, jnp.int32), jnp.broadcast_to(mask, (b, *mask.shape)), positions=positions)
    scores = jax.nn.log_softmax(model.logits(hidden[:, :t]), axis=-1)
    found = jnp.take_along_axis(scores, texts.tokens[..., None], axis=-1)[..., 0]
    loads = [layer.ffn.load[...] for layer in model.layers if isinstance(layer.ffn, EveryExpertModule)]
    return -jnp.sum(found * weights) / jnp.sum(weights), loads
