"""Teacher-forced log-probabilities by the training-side pass: the whole sequence at once, no cache.

It shares the model with the serving path and nothing else, so that each checks the other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.decode.sampling import TokenScores
from jaxserve.decode.step import Model, causal

POSITIONS = 64  # positions whose logits exist at the same time: the whole matrix of a long text would not fit


def hidden_states(model: Model, tokens: Int[Array, "b t"], block: int = 1) -> Float[Array, "b t d"]:
    """Final hidden states of every position, which sees those before it and the others of its block."""
    b, t = tokens.shape
    mask = jnp.broadcast_to(causal(t, block), (b, t, t))
    return model(tokens, jnp.zeros(b, jnp.int32), mask)[0]


def logits(model: Model, tokens: Int[Array, "b t"], block: int = 1) -> Float[Array, "b t v"]:
    """Scores of every token at every position."""
    return model.logits(hidden_states(model, tokens, block))


def score(model: Model, tokens: Int[Array, "b t"], alternatives: int = 0) -> TokenScores:
    """Log-probability of each token given those before it, and of the most likely tokens there.

    Returns:
        ``chosen[:, i]`` belongs to ``tokens[:, i + 1]``; the width is ``t - 1``.
    """
    hidden = hidden_states(model, tokens)[:, :-1]
    b, width, d = hidden.shape
    padding = -width % POSITIONS
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))).reshape(b, -1, POSITIONS, d)
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, padding))).reshape(b, -1, POSITIONS)

    def score_positions(part: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        states, target = part
        scores = model.logits(states)
        normal = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        chosen = jnp.take_along_axis(scores, target[..., None], axis=-1) - normal
        top, ids = jax.lax.top_k(scores, alternatives)
        return chosen[..., 0], ids.astype(jnp.int32), top - normal

    parts = jax.lax.map(score_positions, (hidden.swapaxes(0, 1), targets.swapaxes(0, 1)))
    chosen, ids, top = (
        jnp.moveaxis(part, 0, 1).reshape(b, width + padding, *part.shape[3:])[:, :width] for part in parts
    )
    return TokenScores(chosen=chosen, top_ids=ids, top=top)
