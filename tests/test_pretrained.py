"""A run that begins with the weights of a Hugging Face folder."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from styrax.core import Policy, UserError, tree
from styrax.core.cli import main
from styrax.core.mesh import MeshConfig
from styrax.models import DecoderConfig, from_pretrained, save_pretrained
from styrax.models.pretrained import PretrainedConfig
from styrax.train.shardings import lay_out

SIZES = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "mlp_dim": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = DecoderConfig(**SIZES).build(vocab_size=320, rngs=nnx.Rngs(3))
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_pretrained(model, path)
    return str(path)


def train(folder, run, *overrides):
    text = run.parent / "documents.txt"
    text.write_text("\n\n".join(f"line {n} of some text, long enough to be cut" for n in range(200)))
    return main(
        [
            "train",
            "finetune",
            "--run",
            str(run),
            f"model.from={folder}",
            f'data.sources=["{text}"]',
            "data.tokenizer=byte",
            r'data.split_on="\n\n"',
            "data.seq_len=16",
            "data.batch_size=8",
            "train.steps=2",
            "train.eval_every=0",
            "train.precision=f32",
            "checkpoint.every=1",
            "optim.learning_rate=1e-4",
            *overrides,
        ]
    )


def test_it_begins_with_the_folder_and_freezes(folder, tmp_path, capsys):
    """The first loss is that of the folder's weights; what is frozen stays; a resume does not read the folder."""
    assert train(folder, tmp_path / "run", 'model.freeze=["embed/**"]') == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    other = DecoderConfig(**SIZES).build(vocab_size=320, rngs=nnx.Rngs(0))
    assert len(lines) == 2 and np.isfinite(lines[0]["loss"])
    from styrax.core.config import find_schema, read_config
    from styrax.train.compose import load_model

    resolved = read_config(find_schema("train"), str(tmp_path / "run" / "config.toml"), [])
    trained, step = load_model(resolved, tmp_path / "run" / "checkpoints", 257)
    first, last = tree.flatten(from_pretrained(folder)), tree.flatten(trained)
    assert step == 2
    np.testing.assert_array_equal(last["embed/embedding"], first["embed/embedding"])
    moved = np.abs(np.asarray(last["layers/mlp/up/kernel"] - first["layers/mlp/up/kernel"])).max()
    assert 0 < moved < 1e-3
    assert np.abs(np.asarray(first["embed/embedding"] - tree.flatten(other)["embed/embedding"])).max() > 1e-2


def test_from_is_short_for_kind_and_folder(folder):
    from styrax.core import UsageError
    from styrax.train.config import SCHEMA

    found = SCHEMA.resolve({"model": {"from": folder}})
    assert found == SCHEMA.resolve({"model": {"kind": "pretrained", "folder": folder}})
    assert found["model"] == PretrainedConfig(folder=folder)
    assert found.diff() == {"model": {"kind": "pretrained", "folder": folder}}
    for also, message in (("kind=decoder", 'it means kind = "pretrained", and model.kind is "decoder"'),
                          ("folder=x", "it says what model.folder says")):  # fmt: skip
        with pytest.raises(UsageError, match=rf"^model.from: {message}"):
            SCHEMA.resolve({"model": {"from": folder}}, [f"model.{also}"])


def test_it_loads_into_shards(folder):
    config = PretrainedConfig(folder=folder)
    mesh = MeshConfig(axes={"fsdp": 4, "tensor": 2}).build()
    policy = Policy("f32", "bf16", "f32")
    import optax

    _, abstract, make = lay_out(
        lambda rngs: config.build(vocab_size=300, rngs=rngs, policy=policy),
        optax.adam(1e-3),
        mesh=mesh,
        logical_axes=config.logical_axes(),
        initial=lambda mesh, rules: config.load(mesh=mesh, rules=rules, policy=policy),
    )
    state = make()
    expected = tree.flatten(from_pretrained(folder))
    for path, leaf in tree.flatten(state.params).items():
        assert leaf.sharding == tree.flatten(abstract.params)[path].sharding
        np.testing.assert_array_equal(leaf, expected[path])
    moments = tree.flatten(state.opt_state)
    assert any(not leaf.is_fully_replicated for leaf in moments.values() if isinstance(leaf, jax.Array))


def test_what_does_not_fit_is_said(folder, tmp_path, capsys):
    with pytest.raises(UserError, match=r"data have 400 tokens, and the model in .* knows 320; use its tokenizer"):
        PretrainedConfig(folder=folder).build(vocab_size=400, rngs=nnx.Rngs(0))
    assert train("", tmp_path / "run") != 0
    assert "expected the folder of a model" in capsys.readouterr().err
    assert train(str(tmp_path / "nothing"), tmp_path / "other") != 0
    assert "config.json" in capsys.readouterr().err
