"""Every family against transformers itself: logits, every layer, every gradient, and our folders read there."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import cases, tokens, write
from flax import nnx

from styrax.core import tree
from styrax.models import registry
from styrax.models.hf import from_pretrained, open_tensors, save_pretrained
from styrax.models.hf.plan import layer_paths, placed

torch = pytest.importorskip("torch")
os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

CASES = cases()
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )


def close(got, expected, what, bound=2e-4):
    error = np.abs(np.asarray(got) - expected) / np.maximum(1, np.abs(expected))
    assert error.max() < bound, f"{what}: {error.max()}"


class Seen:
    """A block that leaves its output behind."""

    def __init__(self, block, left):
        self.block, self.left = block, left

    def __call__(self, x, *rest, **named):
        out = self.block(x, *rest, **named)
        self.left.append(out[0])
        return out


def every_layer(model, ids):
    left = []
    blocks = tuple(Seen(block, left) for block in model.blocks())
    x = model.hidden(blocks, ids).x
    return [each.reshape(x.shape) for each in left], model.logits(x)


@pytest.mark.parametrize("name", CASES)
def test_layers_and_logits(name, tmp_path):
    case, _ = CASES[name]
    reference, info = theirs(write(case, tmp_path / "model"))
    assert not any(info.values()), info
    ids = tokens(case.vocab_size)
    with torch.no_grad():
        out = reference.eval()(torch.as_tensor(ids), output_hidden_states=True)
    with jax.default_matmul_precision("highest"):
        model = from_pretrained(tmp_path / "model", scan="off", remat="none")
        layers, logits = jax.jit(every_layer, compiler_options=QUICK)(model, jnp.asarray(ids))
    # Theirs begin with the embedding, and the last is normalised.
    assert len(layers) == len(out.hidden_states) - 1
    for number, (ours, other) in enumerate(zip(layers[:-1], out.hidden_states[1:-1], strict=True)):
        close(ours, other.numpy(), f"layer {number}")
    close(logits, out.logits.numpy(), "logits")


@pytest.mark.parametrize("name", CASES)
def test_our_folder_is_read_there(name, tmp_path):
    case, _ = CASES[name]
    model = from_pretrained(write(case, tmp_path / "model"))
    kind = registry.family_of(case.table)[0].model_type
    save_pretrained(model, tmp_path / "ours", family=kind, extra=TOKENS)
    again, info = theirs(tmp_path / "ours")
    assert not any(info.values()), info
    before, _ = theirs(tmp_path / "model")
    ids = torch.as_tensor(tokens(case.vocab_size))
    with torch.no_grad():
        np.testing.assert_allclose(again.eval()(ids).logits, before.eval()(ids).logits, atol=1e-5)


ONE_EACH = {registry.family_of(case.table)[0].model_type: name for name, (case, _) in CASES.items()}


@pytest.mark.parametrize("name", [*ONE_EACH.values(), "gemma4-e2b"])
def test_gradients(name, tmp_path):
    """The gradients of all tensors, by the names that they have in files."""
    case, _ = CASES[name]
    reference, _ = theirs(write(case, tmp_path / "model"))
    ids = tokens(case.vocab_size - 1) + 1  # for torch gives the embedding of padding, 0, no gradient
    weights = np.random.default_rng(5).normal(size=(*ids.shape, case.vocab_size)).astype(np.float32)
    (reference.eval()(torch.as_tensor(ids)).logits * torch.as_tensor(weights)).mean().backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    reference.save_pretrained(tmp_path / "grads")
    model = from_pretrained(tmp_path / "model")
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        return (nnx.merge(graph, params, rest)(jnp.asarray(ids)) * weights).mean()

    with jax.default_matmul_precision("highest"):
        grads = tree.flatten(jax.jit(jax.grad(loss), compiler_options=QUICK)(params))
    layers = layer_paths(model.config)
    checked = 0
    with open_tensors(tmp_path / "grads") as expected:
        largest = max(float(np.abs(tensor.read()).max()) for tensor in expected.values())
        for rule in registry.family_of(case.table)[0].rules(model.config):
            spots = [placed(path, layers) for path in rule.ours]
            if any(path not in grads for path, _ in spots):
                continue  # a buffer
            parts = [np.asarray(grads[path] if index is None else grads[path][index]) for path, index in spots]
            for number, tensor in enumerate(rule.names()):
                error = np.abs(rule.save(parts, number) - expected[tensor].read()).max()
                assert error < 1e-4 * largest, (tensor, error, largest)
                checked += 1
    assert checked > 20
