"""Configurations that ship with the package, found by name."""

from importlib.resources import files

from styrax.core.config import Recipe


def _recipe(name: str, doc: str) -> Recipe:
    return Recipe(name=name, path=files(__name__).joinpath(f"{name}.toml"), doc=doc)


QUICKSTART = _recipe(
    "quickstart", "A small decoder on the source of Python's standard library; about two minutes on two cores."
)
NANOGPT_CHAR = _recipe("nanogpt-char", "Ten million parameters on single bytes, the size of nanoGPT's first example.")
GPT2_124M = _recipe("gpt2-124m", "GPT-2 of 124 million parameters, half a million tokens a step.")
LLAMA3_1B = _recipe("llama3-1b", "Llama 3.2 1B from scratch, on 32 chips of TPU v6e.")
LLAMA3_8B = _recipe("llama3-8b", "Llama 3 8B from scratch, on 64 chips of TPU v5p.")
LLAMA3_70B = _recipe("llama3-70b", "Llama 3 70B from scratch, on 512 chips of TPU v5p.")
MIXTRAL_8X7B = _recipe("mixtral-8x7b", "Mixtral 8x7B from scratch with expert parallelism, on 128 chips of TPU v5p.")
FINETUNE = _recipe("finetune", "The model of a Hugging Face folder, trained further on text of yours.")
