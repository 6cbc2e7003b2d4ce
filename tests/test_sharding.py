"""On eight forced host devices: arrays lie where the rules say, and a sharded pass gives the unsharded numbers."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import pytest

from jaxserve.axes import MeshShape
from jaxserve.sharding import axis_size, make_mesh, replicated, sharding, spec, under

PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np
from jaxserve.decode import jitted
from jaxserve.models.family import family_of
from jaxserve.models.weights import nest, params_of
from jaxserve.sharding import make_mesh, sharding
from jaxserve.testing import TINY, random_leaves, random_params
family = family_of(TINY | {"num_attention_heads": 8, "hidden_size": 64, "num_key_value_heads": 8, "vocab_size": 264})
params = random_params(family)
leaves = random_leaves(family)
tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 40)), jnp.int32)
alone = jitted.logits(family.graphdef(jnp.float32), params, tokens)
found = {}
for tensor in (2, 4, 8):
    mesh = make_mesh(1, tensor)
    places = {rule.param: sharding(mesh, rule.axes, rule.shape) for rule in family.rules}
    placed = params_of(nest({name: jax.device_put(leaf, places[name]) for name, leaf in leaves.items()}))
    logits = jitted.logits(family.graphdef(jnp.float32), placed, tokens)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(placed))
    mine = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    found[tensor] = [float(jnp.abs(logits - alone).max()), mine / whole]
print(json.dumps(found))
"""


def test_sharded_is_unsharded():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for tensor, (difference, share) in found.items():
        assert difference < 1e-4
        assert share == pytest.approx(1 / int(tensor), rel=0.05)  # the norms are whole on each device


def test_axes_that_do_not_divide_stay_whole():
    mesh = make_mesh()
    assert sharding(mesh, ("model", "heads", None), (8, 3, 4)).is_fully_replicated
    assert mesh.shape == {"expert": 1, "tensor": 1}
    assert len(jax.devices()) >= 1


def test_programs_are_traced_under_their_mesh():
    mesh = make_mesh()
    assert axis_size("expert") == 1
    with under(mesh):
        assert axis_size("tensor") == 1
        assert not jax.sharding.get_abstract_mesh().empty
    with under(None):
        assert jax.sharding.get_abstract_mesh().empty


def test_a_spec_names_what_splits_each_axis():
    assert tuple(spec(("vocab", "model"), (16, 4), MeshShape(2, 4))) == (("tensor", "expert"), None)
    assert tuple(spec(("experts", "model", "ffn"), (4, 6, 8), MeshShape(2, 4))) == ("expert", None, "tensor")
    assert tuple(spec((None, "model"), (4, 6), MeshShape(2, 2))) == (None, None)
    assert tuple(spec(("vocab", "model"), (16, 4))) == (None, None)  # no mesh
    assert replicated(make_mesh()).is_fully_replicated
