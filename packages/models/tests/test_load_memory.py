"""How much memory loading takes beside the parameters."""

import json
import subprocess
import sys

import pytest
from flax import nnx

from styrax.models import DecoderConfig, save_pretrained

LOAD = """
import json, sys, threading, time
import jax
from styrax.core import MeshConfig
from styrax.models import from_pretrained

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

mesh = MeshConfig(axes={"fsdp": 8}).build() if sys.argv[2] == "8" else None
jax.numpy.zeros(1).block_until_ready()
before = most = anonymous()
done = False

def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
model = from_pretrained(sys.argv[1], mesh=mesh)
done = True
thread.join()
size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
print(json.dumps([size, most - before]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = DecoderConfig(num_layers=8, embed_dim=768, num_heads=12, mlp_dim=2048, tied=False)
    model = config.build(vocab_size=8192, rngs=nnx.Rngs(0))
    folder = tmp_path_factory.mktemp("model") / "model"
    save_pretrained(model, folder, shard_bytes=60_000_000, verify=False)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("devices", [1, 8])
def test_little_more_than_the_parameters(devices, folder):
    """Whole stacks are copied once, on one device and on eight; a second copy of the largest alone would be 1.17."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, folder, str(devices)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    size, most = json.loads(done.stdout)
    assert size > 200_000_000
    assert most < 1.1 * size
