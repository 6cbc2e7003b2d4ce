"""What any device promises, tried on the one that is a hash; test_jax_device tries the real one."""

from __future__ import annotations

from jaxserve.config import EngineConfig, Pool
from jaxserve.engine.device import Admission
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.plan import ModelShape, make_plan
from jaxserve.testing import HashDevice, hash_tokens

PLAN = make_plan(
    ModelShape(200, 1000, 8, 4096, 8, 2, 16),
    EngineConfig(pools=(Pool(2, 64),), prefill_buckets=(16, 32)),
    dtype="float32",
    dtype_bytes=4,
    memory_limit=2**40,
)


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
