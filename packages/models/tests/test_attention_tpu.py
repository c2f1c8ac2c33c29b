"""Attention of a training step, compiled for TPUs that are not there: with the kernel, and without a table of scores.

uv run --with libtpu==0.0.42.1 pytest -n 0 -m slow packages/models/tests/test_attention_tpu.py
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

SEQ = 512  # no other axis is as long
PROGRAM = """
import json, re, sys
import jax, numpy as np
from flax import nnx
from jax.experimental.topologies import get_topology_desc
from jax.sharding import NamedSharding, PartitionSpec
from styrax.core import DEFAULT_RULES, MeshConfig, Policy
from styrax.core.mesh import shardings
from styrax.models import Arch, Attn, DecoderConfig, Latent, Runtime

SEQ = int(sys.argv[1])
devices = get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
mesh = MeshConfig(axes={"fsdp": 2, "tensor": 2}).build(devices)
near = Attn(window=100, sinks=True, softcap=30.0)
LAYERS = {
    "plain": Arch(),
    "mixed": Arch(attn=Attn(chunk=96), local=near, layers=("local", "attn")),
    "latent": Arch(latent=Latent(kv_rank=32, nope_dim=32, rope_dim=16, v_dim=24), layers=("latent",)),
}


def compiled(attention, layers, set_mesh, heads=(4, 2)):
    sizes = dict(num_layers=2, embed_dim=128, num_heads=heads[0], num_kv_heads=heads[1], head_dim=32, mlp_dim=192)
    config = DecoderConfig(**sizes, runtime=Runtime(attention=attention), arch=LAYERS[layers])
    policy = Policy.parse("bf16")
    like = nnx.eval_shape(lambda: config.build(vocab_size=320, rngs=nnx.Rngs(0), policy=policy))
    where = shardings(like, config.logical_axes(), DEFAULT_RULES, mesh)
    like = jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), like, where)
    ids = jax.ShapeDtypeStruct((4, SEQ), "int32", sharding=NamedSharding(mesh, PartitionSpec("fsdp")))

    def loss(model, tokens, segment_ids):
        terms = model.losses(tokens, tokens, (segment_ids != 0).astype("float32"), segment_ids=segment_ids)
        return sum(term.total for term in terms.values())

    step = jax.jit(jax.grad(loss))
    if set_mesh:
        with jax.set_mesh(mesh):
            return step.lower(like, ids, ids).compile().as_text()
    return step.lower(like, ids, ids).compile().as_text()


for each in json.loads(sys.argv[2]):
    text = compiled(**each)
    kernels = sorted(set(re.findall(r"splash_m[hq]a_(?:fwd|dq|dkv)\\w*", text)))
    scores = sorted(set(re.findall(rf"\\w+\\[[\\d,]*\\b{SEQ},{SEQ}\\]", text)))
    print("FOUND", json.dumps({"calls": text.count("tpu_custom_call"), "kernels": kernels, "scores": scores,
                               "loops": len(re.findall(r" while\\(", text))}))
"""


def found(*cases):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    command = [sys.executable, "-c", PROGRAM, str(SEQ), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(lines) == len(cases)
    return lines


@pytest.mark.slow
def test_the_reference_has_scores_and_no_kernel():
    """So the other tests would see them."""
    (plain,) = found({"attention": "reference", "layers": "plain", "set_mesh": True})
    assert plain["calls"] == 0
    assert any(shape.startswith("f32") for shape in plain["scores"])


@pytest.mark.slow
def test_splash_has_a_kernel_and_no_scores():
    cases = [{"attention": "splash", "layers": layers, "set_mesh": True} for layers in ("plain", "mixed", "latent")]
    # Heads that the tensor axis does not divide: keys are repeated, or everything is computed by each of its devices.
    cases += [{**cases[0], "heads": heads} for heads in ((4, 1), (3, 3))]
    for one in found(*cases):
        assert one["calls"] >= 3
        assert {name.split("_")[2] for name in one["kernels"]} == {"fwd", "dq", "dkv"}
        assert one["scores"] == []


@pytest.mark.slow
def test_auto_goes_by_what_is_compiled_for():
    """The host is a CPU; the mesh that is set, or that of the arguments alone, says what the program is for."""
    named, *automatic = found(
        {"attention": "splash", "layers": "plain", "set_mesh": True},
        {"attention": "auto", "layers": "plain", "set_mesh": True},
        {"attention": "auto", "layers": "plain", "set_mesh": False},
    )
    assert named["loops"]  # and so do the loop over layers and recomputation
    assert automatic == [named, named]
