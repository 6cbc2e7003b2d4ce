"""The routed product against plain sums, in any company, on other platforms, and over eight forced devices."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxserve.models import experts as subject
from jaxserve.models.experts import ExpertWeights, block_rows, routed
from jaxserve.models.kernels import native
from jaxserve.models.layers import GLUS
from jaxserve.models.passes import Routing
from jaxserve.models.quant import Packed

E, D, F, C = 8, 32, 16, 3
ACCELERATORS = [
    ("cuda", AbstractDevice("NVIDIA H100", 132, "gpu"), "custom_call @__gpu$xla.gpu.triton"),
    ("tpu", AbstractDevice("TPU v5 lite", 1, "tpu"), "custom_call @tpu_custom_call"),
]


def weights(bias=True, dtype=np.float32, e=E, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    shapes = ((e, 2, F, D), (e, D, F), (e, 2, F), (e, D))
    leaves = [jnp.asarray(draw(shape) / 4, dtype) for shape in shapes]
    return ExpertWeights(*leaves) if bias else ExpertWeights(*leaves[:2])


def tokens(m, e=E, c=C, seed=1, dtype=np.float32):
    draw = np.random.default_rng(seed)
    chosen = np.stack([draw.permutation(e)[:c] for _ in range(m)]).astype(np.int32)
    shares = draw.random((m, c), np.float32)
    return jnp.asarray(draw.standard_normal((m, D)), dtype), jnp.asarray(chosen), jnp.asarray(shares)


def plainly(x, chosen, shares, experts, glu):
    x, chosen, shares = (np.asarray(part, np.float64) for part in (x, chosen, shares))
    gate_up, down = (np.asarray(part, np.float64) for part in (experts.gate_up, experts.down))
    y = np.zeros_like(x)
    for token in range(len(x)):
        for expert, share in zip(chosen[token].astype(int), shares[token], strict=True):
            both = gate_up[expert] @ x[token]
            if experts.gate_up_bias is not None:
                both = both + np.asarray(experts.gate_up_bias[expert])
            out = down[expert] @ np.asarray(glu(jnp.asarray(both[0]), jnp.asarray(both[1])))
            if experts.down_bias is not None:
                out = out + np.asarray(experts.down_bias[expert])
            y[token] += share * out
    return y


@functools.partial(jax.jit, static_argnames=("glu", "blocks"))
def run(x, chosen, shares, experts, real=None, glu="silu", blocks=False):
    return routed(x, chosen, shares, experts, GLUS[glu], real, Routing(native=not blocks))


# By native kernels, where they are there, and by the blocks that take their place.
either = pytest.mark.parametrize("blocks", [False, True])


@either
@pytest.mark.parametrize(("m", "bias", "glu"), [(1, True, "silu"), (5, False, "gelu_tanh"), (90, True, "clamped")])
def test_each_token_goes_through_its_experts(m, bias, glu, blocks, monkeypatch):
    monkeypatch.setattr(subject, "PART_BYTES", 1024)  # kernels fall into parts
    monkeypatch.setattr(subject, "LONELY", 0.4)  # the first case goes row by row
    assert (block_rows(m, C, E) == 1) == (m == 1)
    given, experts = tokens(m), weights(bias)
    expected = plainly(*given, experts, GLUS[glu])
    np.testing.assert_allclose(run(*given, experts, glu=glu, blocks=blocks), expected, atol=2e-5)
    x, chosen, shares = given
    wrong = {
        "gate and up exchanged": (x, chosen, shares, ExpertWeights(experts.gate_up[:, ::-1], experts.down)),
        "weights of the wrong choice": (x, chosen, shares[:, ::-1], experts),
        "the next expert": (x, (chosen + 1) % E, shares, experts),
    }
    for what, planted in wrong.items():
        assert np.abs(run(*planted, glu=glu, blocks=blocks) - expected).max() > 0.01, what


def test_grouped_products_of_other_platforms_agree():
    (x, chosen, shares), experts = tokens(40), weights()
    groups = subject._sort(chosen.at[7].set(E), E)  # one is of no expert
    grouped = functools.partial(subject._grouped, activation=GLUS["silu"], product=subject._on_accelerator)
    blocks = functools.partial(subject._in_blocks, activation=GLUS["silu"], rows=4)
    found, expected = (jax.jit(form)(x, groups, shares, experts) for form in (grouped, blocks))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not np.any(np.asarray(expected[7]))


@either
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("m", "e"), [(2, 32), (8, 8), (64, 8)])
def test_a_token_has_the_same_bits_in_any_company(m, e, dtype, blocks):
    experts = weights(dtype=dtype, e=e)
    x, chosen, shares = tokens(m, e, dtype=dtype)
    alone = np.asarray(run(x, chosen, shares, experts, blocks=blocks), np.float32)[0]
    for seed in range(4):
        others = tokens(m, e, seed=10 + seed, dtype=dtype)
        at = seed * 7 % m
        company = (other.at[at].set(one[0]) for other, one in zip(others, (x, chosen, shares), strict=True))
        found = np.asarray(run(*company, experts, blocks=blocks), np.float32)
        np.testing.assert_array_equal(found[at], alone)
        assert m == 2 or not np.array_equal(found[at - 1], alone)


def test_inner_widths_that_do_not_stream_are_multiplied():
    (x, chosen, shares), experts = tokens(1, e=64), weights(e=64)
    narrow = ExpertWeights(experts.gate_up[:, :, :12], experts.down[..., :12])
    expected = plainly(x, chosen, shares, narrow, GLUS["silu"])
    np.testing.assert_allclose(run(x, chosen, shares, narrow, blocks=True), expected, atol=2e-5)


@either
def test_only_chosen_experts_are_read(blocks):
    multiplied = functools.partial(run, blocks=blocks)
    (x, chosen, shares), experts = tokens(6), weights()
    chosen = chosen % 4 * 2  # no odd one
    spoilt = jax.tree.map(lambda leaf: leaf.at[1::2].set(jnp.nan), experts)
    np.testing.assert_array_equal(multiplied(x, chosen, shares, spoilt), multiplied(x, chosen, shares, experts))
    assert np.isnan(multiplied(x, chosen + 1, shares, spoilt)).all()


@either
def test_tokens_that_do_not_matter_go_to_no_expert(blocks):
    (x, chosen, shares), experts = tokens(20), weights()
    real = jnp.arange(20) % 3 > 0
    whole = run(x, chosen, shares, experts, blocks=blocks)
    found = run(x.at[::3].set(jnp.nan), chosen, shares, experts, real, blocks=blocks)
    np.testing.assert_array_equal(found, np.where(real[:, None], whole, 0))
    pairs = subject._sort(jnp.where(real[:, None], chosen, E), E).ends[-1]
    assert pairs == np.sum(real) * C
    assert not np.any(np.asarray(run(x, chosen, shares, experts, jnp.zeros(20, bool), blocks=blocks)))


def test_packed_kernels_are_unpacked_expert_by_expert():
    (x, chosen, shares), plain = tokens(9), weights(bias=False)
    draw = np.random.default_rng(3)
    blocks = draw.integers(0, 256, (E, D, 1, 16), np.uint8)
    packed = Packed(jnp.asarray(blocks), jnp.asarray(draw.integers(125, 129, (E, D, 1), np.uint8)))
    dense = packed.dense(jnp.float32)[..., :F]
    wide = ExpertWeights(jnp.pad(plain.gate_up, ((0, 0), (0, 0), (0, F), (0, 0))), packed)
    np.testing.assert_allclose(
        run(x, chosen, shares, wide),
        run(x, chosen, shares, ExpertWeights(plain.gate_up, dense)),
        rtol=1e-6,
        atol=1e-5,
    )


def test_shapes_alone_decide_the_blocks():
    assert [block_rows(m, 8, 128) for m in (1, 4, 5, 9, 64, 512)] == [1, 1, 5, 8, 8, 64]
    assert block_rows(512, 2, 8) == 128
    assert block_rows(3, 2, 4) == 3


@pytest.mark.parametrize(("platform", "form"), [("cpu", "stablehlo.while"), ("cuda", "ragged"), ("tpu", "ragged")])
def test_it_lowers_for_each_platform(platform, form):
    given = (*tokens(16), weights())
    text = jax.export.export(run, platforms=[platform])(*given, blocks=True).mlir_module()
    assert form in text
    assert platform == "cpu" or "stablehlo.while" not in text


@pytest.mark.skipif(not native.usable(jnp.float32), reason=f"on this CPU: {native.describe(jnp.float32)}")
def test_native_kernels_are_for_the_cpu_alone():
    given, called = (*tokens(16), weights()), [jax.export.DisabledSafetyCheck.custom_call(native.TARGET)]
    texts = {
        platform: jax.export.export(run, platforms=[platform], disabled_checks=called)(*given).mlir_module()
        for platform in ("cpu", "cuda", "tpu")
    }
    assert [native.TARGET in text for text in texts.values()] == [True, False, False]
    assert "stablehlo.while" not in texts["cpu"]
    half = run.lower(*(part.astype(jnp.float16) if part.dtype == jnp.float32 else part for part in given[:3]), given[3])
    assert native.TARGET not in half.as_text()  # a type that they do not have


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("sizes", "least"), [((1, 1), None), ((4, 2), None), ((4, 2), 16)])
@pytest.mark.parametrize(("platform", "device", "call"), ACCELERATORS)
def test_kernels_of_accelerators_are_lowered_inside_a_mesh(platform, device, call, sizes, least):
    leaves = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((E, 2, 256, 128), (E, 128, 256))]
    given = [jax.ShapeDtypeStruct((32, 128), jnp.bfloat16)]
    given += [jax.ShapeDtypeStruct((32, C), dtype) for dtype in (jnp.int32, jnp.float32)]
    safe = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]

    def lowered(product):
        routing = Routing(product, least)
        run = jax.jit(lambda *given: routed(*given[:3], ExpertWeights(*given[3:]), GLUS["silu"], routing=routing))
        mesh = AbstractMesh(sizes, ("expert", "tensor"), (AxisType.Auto,) * 2, abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.export.export(run, platforms=[platform], disabled_checks=safe)(*given, *leaves).mlir_module()

    text, plain = lowered("auto"), lowered("ragged_dot")
    assert text.count(call) >= 2  # one for gate and up, one for down
    assert "chlo.ragged_dot" not in text
    assert call not in plain
    assert "chlo.ragged_dot" in plain
    assert ("stablehlo.all_to_all" in text) == (least is not None)


# --- over a mesh ------------------------------------------------------------------------------------------------------

MESHES = [(1, 8), (2, 4), (4, 2), (8, 1)]
PROGRAM = """
import json, re
import jax, jax.numpy as jnp, numpy as np
from jaxserve.models import experts as subject
from jaxserve.models.experts import ExpertWeights, routed
from jaxserve.models.layers import GLUS
from jaxserve.models.passes import Routing
from jaxserve.models.quant import Packed
from jaxserve.sharding import make_mesh, sharding
E, D, F, C, M = 16, 32, 64, 4, 64
draw = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(draw.standard_normal(shape) / 4, jnp.float32)
plain = ExpertWeights(normal(E, 2, F, D), normal(E, D, F), normal(E, 2, F), normal(E, D))
packed = Packed(
    jnp.asarray(draw.integers(0, 256, (E, D, 8, 4), np.uint8)),
    jnp.asarray(draw.integers(125, 129, (E, D, 8), np.uint8)),
)
packed = ExpertWeights(plain.gate_up, packed, plain.gate_up_bias, plain.down_bias)
x, shares = normal(M, D), normal(M, C)
chosen = jnp.asarray(np.stack([draw.permutation(E)[:C] for _ in range(M)]), jnp.int32)
crowded = jnp.asarray(np.stack([draw.permutation(4)[:C] for _ in range(M)]), jnp.int32)
real = jnp.arange(M) < 50
AXES = (("experts", None, "ffn", "model"), ("experts", "model", "ffn"), ("experts", None, "ffn"), ("experts", "model"))

def gathered(text):
    sizes = []
    for dims in re.findall(r"= \\w+\\[([\\d,]*)\\]\\S* all-gather", text):
        sizes.append(int(np.prod([int(n) for n in dims.split(",") if n])))
    return max(sizes, default=0)

def place(mesh, experts):
    held = (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias)
    put = lambda leaf, axes: jax.device_put(leaf, sharding(mesh, axes, leaf.shape))
    return ExpertWeights(*(jax.tree.map(lambda leaf: put(leaf, a), part) for part, a in zip(held, AXES)))

def product(least=None, native=True):
    routing = Routing(exchange_tokens=least, native=native)
    return jax.jit(lambda *given: routed(*given[:4], GLUS["silu"], real, routing))

found = []
whole = {name: product()(x, of, shares, plain) for name, of in (("spread", chosen), ("crowded", crowded))}
whole["packed"] = product()(x, chosen, shares, packed)
for expert, tensor in MESHES:
    mesh = make_mesh(expert, tensor)
    kernels, narrow = place(mesh, plain), place(mesh, packed)
    share = sum(leaf.addressable_shards[0].data.nbytes for leaf in (kernels.gate_up, kernels.down))
    share /= plain.gate_up.nbytes + plain.down.nbytes
    with jax.set_mesh(mesh):
        for exchange in (False, True)[: expert]:
            compiled = product(M if exchange else M + 1).lower(x, chosen, shares, kernels).compile()
            worst = max(
                float(jnp.abs(compiled(x, of, shares, kernels) - whole[name]).max())
                for name, of in (("spread", chosen), ("crowded", crowded))
            )
            text = compiled.as_text()
            found.append({
                "mesh": [expert, tensor], "exchange": exchange, "difference": worst, "share": share,
                "gathered": gathered(text), "sent": "all-to-all" in text,
            })
        if (expert, tensor) != (2, 4):
            continue
        y = product()(x, chosen, shares, narrow)
        found[-1]["packed"] = float(jnp.abs(y - whole["packed"]).max())
        y = product(native=False)(x, chosen, shares, kernels)
        found[-1]["blocks"] = float(jnp.abs(y - whole["spread"]).max())
        careless = lambda *given: subject._together(*given, GLUS["silu"], 8)
        text = jax.jit(careless).lower(x, chosen, shares, kernels).compile().as_text()
        found[-1]["careless"] = gathered(text)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def over_meshes():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", f"MESHES = {MESHES}\n{PROGRAM}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sharded_is_unsharded(over_meshes):
    assert [found["mesh"] for found in over_meshes if not found["exchange"]] == [list(mesh) for mesh in MESHES]
    assert sum(found["exchange"] for found in over_meshes) == 3
    assert any("packed" in found and found["blocks"] < 1e-5 for found in over_meshes)
    for found in over_meshes:
        assert found["difference"] < 1e-5, found
        assert found["share"] == 1 / 8, found
        assert found["sent"] == (found["exchange"] and found["mesh"][0] > 1), found
        assert found.get("packed", 0) < 1e-4, found


def test_no_expert_travels(over_meshes):
    smallest_kernel = 16 * 32 * 64 // 8  # of one device
    for found in over_meshes:
        assert found["gathered"] < smallest_kernel, found
    assert max(found.get("careless", 0) for found in over_meshes) >= smallest_kernel, "it would not be seen"
