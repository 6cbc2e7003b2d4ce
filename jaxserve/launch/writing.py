"""Text in, text out, without a server: what ``jaxserve generate`` and ``score`` do, and notebooks may."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from jaxserve.decode import jitted
from jaxserve.engine.request import FinishReason, Request, SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.launch.loading import LoadedModel
from jaxserve.sharding import under
from jaxserve.text.detokenize import Detokenizer

SCORE_PADDING = 64  # texts are padded to multiples of this: one program for many lengths


def generate(model: LoadedModel, prompt: str, sampling: SamplingParams, *, chat: bool = False) -> Iterator[str]:
    """Continues ``prompt``, or answers it as a user's message; yields text as soon as it cannot change any more.

    Raises:
        InvalidRequest: the model has no chat template, or a parameter is out of range.
        EngineError: the step failed.
    """
    if not chat:
        ids = model.tokenizer.encode(prompt)
    elif model.chat_template is None:
        raise InvalidRequest(f"{model.id} has no chat template", param="chat")
    else:
        ids = model.chat_template.encode(model.tokenizer, [{"role": "user", "content": prompt}])
    request = Request("generate", tuple(ids), sampling)
    detokenizer = Detokenizer(model.tokenizer, continues=not chat)
    model.engine.submit(request)
    try:
        while model.engine.has_work:
            for _, delta in model.engine.tick():
                if delta.error is not None:
                    raise delta.error
                ended = delta.finish_reason is FinishReason.STOP  # its last token is then no text
                yield detokenizer.push(delta.tokens[:-1] if ended else delta.tokens)
    finally:
        model.engine.cancel(request.id)
    yield detokenizer.finish()


def score(model: LoadedModel, text: str) -> Iterator[tuple[str, float]]:
    """Each token of ``text`` and its natural log-probability after those before it, by the training-side pass.

    The first token has none and is left out.

    Raises:
        InvalidRequest: the text is empty or longer than the model's positions, or the model does not continue text.
    """
    if model.family.decoding is not None:
        raise InvalidRequest(f"{model.id} fills in text: no token is scored after those before it alone", param="model")
    ids = model.tokenizer.encode(text)
    if not 1 < len(ids) <= model.plan.model.max_positions:
        raise InvalidRequest(
            f"the text has {len(ids)} tokens; from 2 to {model.plan.model.max_positions} can be scored", param="text"
        )
    padded = np.zeros((1, -(-len(ids) // SCORE_PADDING) * SCORE_PADDING), np.int32)
    padded[0, : len(ids)] = ids
    with under(model.mesh):
        chosen = np.asarray(jitted.score(model.graphdef, model.params, jnp.asarray(padded)).chosen)[0]
    for token, logprob in zip(ids[1:], chosen.tolist(), strict=False):
        yield model.tokenizer.token_text(token), logprob
