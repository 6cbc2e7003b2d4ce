"""What any device promises, tried on the one that is a hash; test_jax_device tries the real one."""

from __future__ import annotations

from jaxserve.engine.device import Admission
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.testing import HashDevice, hash_plan, hash_tokens

PLAN = hash_plan()


def write(prompt: tuple[int, ...], known: tuple[int, ...] = ()) -> tuple[int, ...]:
    device, tokens = HashDevice(PLAN), prompt + known
    for chunk in PLAN.pools[0].chunks_again(len(prompt), len(tokens)):
        device.prefill(0, 1, chunk, tokens)
    request = Request("a", prompt, SamplingParams(max_tokens=12))
    device.admit(0, 1, Admission(request, tokens, (), 3, len(prompt) - 1))
    return tuple(token for _ in range(24) for token in device.run(0, [1], 3).read().of(1, None).tokens)


def test_known_tokens_are_not_said_again():
    prompt = tuple(range(60, 80))
    whole = tuple(hash_tokens(Request("a", prompt, SamplingParams(max_tokens=12)), 3, 200, ()))
    assert write(prompt) == whole
    for known in range(1, 12):
        assert write(prompt, whole[:known]) == whole[known:]
