"""Files of other tools: the tensors of a Hugging Face folder, in and out, and those of a GGUF file."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.models.hf.gguf import Gguf, GgufTensor, open_gguf, unpermute
    from styrax.models.hf.load import from_pretrained
    from styrax.models.hf.quants import dequantize
    from styrax.models.hf.save import save_pretrained
    from styrax.models.hf.tensors import Tensor, Tensors, open_tensors
    from styrax.models.hf.writing import write_tensors

__all__ = [
    "Gguf",
    "GgufTensor",
    "Tensor",
    "Tensors",
    "dequantize",
    "from_pretrained",
    "open_gguf",
    "open_tensors",
    "save_pretrained",
    "unpermute",
    "write_tensors",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Gguf": "gguf",
        "GgufTensor": "gguf",
        "Tensor": "tensors",
        "Tensors": "tensors",
        "dequantize": "quants",
        "from_pretrained": "load",
        "open_gguf": "gguf",
        "open_tensors": "tensors",
        "save_pretrained": "save",
        "unpermute": "gguf",
        "write_tensors": "writing",
    },
)
