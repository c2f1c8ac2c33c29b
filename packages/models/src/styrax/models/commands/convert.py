"""`styrax models convert`: read a model, and write it as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from styrax.models.commands.sizes import read_size, sized

HELP = "read a Hugging Face folder or a GGUF file, and write a Hugging Face folder"

_KEPT = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
         "generation_config.json", "LICENSE*", "README.md", "*.model")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("source", metavar="SOURCE", help="a folder with config.json and safetensors, or a .gguf file")
    parser.add_argument("target", metavar="TARGET", help="the folder to make")
    parser.add_argument("--dtype", help="of the tensors, such as bf16 (default: each its own)")
    parser.add_argument("--family", help="write it as this family (default: that of the source)")
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="of one file at most (default: 5GB)")
    parser.add_argument(
        "--drop-mtp", action="store_true", help="leave out the modules for multi-token prediction (default: keep them)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model's folder that is there")


def run(args: argparse.Namespace) -> int:
    """Convert it."""
    from styrax.core import Policy
    from styrax.models.hf.load import from_pretrained, read_json
    from styrax.models.hf.plan import further
    from styrax.models.hf.save import save_pretrained
    from styrax.models.hf.tensors import open_tensors
    from styrax.models.registry import family_of

    shard_bytes = read_size(args.shard_size)
    dtype = None if args.dtype is None else Policy(param=args.dtype).param
    source, family, extra = Path(args.source), args.family, {}
    if source.suffix == ".gguf":
        from styrax.models.hf.load_gguf import from_gguf

        model = from_gguf(source, dtype=dtype)
    else:
        table = read_json(source / "config.json")
        own, inner = family_of(table)
        family = family or own.model_type
        with open_tensors(source) as tensors:
            mtp = not args.drop_mtp and own.mtp is not None and bool(further(own.read(inner), tensors))
        extra = {name: value for name, value in table.items() if name not in _OURS}
        model = from_pretrained(source, dtype=dtype, mtp=mtp)
    save_pretrained(
        model,
        args.target,
        family=family,
        shard_bytes=shard_bytes,
        extra=extra,
        files=_files(source),
        overwrite=args.overwrite,
    )
    nbytes = sum(path.stat().st_size for path in Path(args.target).glob("*.safetensors"))
    print(f"{args.target}: {model.config.num_layers} layers, {sized(nbytes)}, compared bit by bit with what was read")
    return 0


#: What is written anew, in the spelling of today and of before.
_OURS = ("rope_scaling", "rope_theta", "rope_parameters", "torch_dtype", "dtype", "text_config", "transformers_version")


def _files(source: Path) -> dict[str, bytes]:
    found: dict[str, Any] = {}
    if source.is_dir():
        for pattern in _KEPT:
            found |= {path.name: path.read_bytes() for path in sorted(source.glob(pattern)) if path.is_file()}
    return found
