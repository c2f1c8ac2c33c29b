"""Tiny models of `golden/families.npz` with modules for multi-token prediction, as their publishers lay them out."""

import json
from pathlib import Path

import numpy as np
from families import Case, cases, values

GOLDEN = Path(__file__).parent / "golden" / "mtp.npz"
MODULES = {"deepseek_v3": 2, "qwen3_next": 1}
LENGTH = 20
LAST = "model.layers.3."


def places(name: str) -> list[dict[str, str]]:
    """Give, for each module, what the parts of the published equation are called; `block` is a prefix."""
    if name == "qwen3_next":
        parts = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "proj": "fc", "norm": "norm"}
        return [{"block": "mtp.layers.0.", **{part: f"mtp.{theirs}.weight" for part, theirs in parts.items()}}]
    parts = {"enorm": "enorm", "hnorm": "hnorm", "proj": "eh_proj", "norm": "shared_head.norm"}
    prefixes = [f"model.layers.{4 + number}." for number in range(MODULES[name])]
    return [{"block": at, **{part: f"{at}{theirs}.weight" for part, theirs in parts.items()}} for at in prefixes]


def case_of(name: str) -> Case:
    """Add the modules to a case, each with a block like the last layer."""
    case, _ = cases()[name]
    width, shapes = case.table["hidden_size"], dict(case.shapes)
    initial = shapes["model.norm.weight"][1]
    for module in places(name):
        block = {key: each for key, each in case.shapes.items() if key.startswith(LAST)}
        shapes |= {module["block"] + key.removeprefix(LAST): each for key, each in block.items()}
        shapes |= {module[part]: [[width], initial] for part in ("enorm", "hnorm", "norm")}
        shapes[module["proj"]] = [[width, 2 * width], None]
    table = {**case.table, "num_nextn_predict_layers": MODULES[name]}
    if name == "qwen3_next":
        table.pop("num_nextn_predict_layers")  # as published
    return Case(name, table, shapes)


def tensors_of(case: Case) -> dict[str, np.ndarray]:
    """Make the tensors; modules of DeepSeek repeat the embedding and the head."""
    made = {key: values(key, *each) for key, each in case.shapes.items()}
    if case.name == "deepseek_v3":
        for module in places(case.name):
            made[f"{module['block']}embed_tokens.weight"] = made["model.embed_tokens.weight"]
            made[f"{module['block']}shared_head.head.weight"] = made["lm_head.weight"]
    return made


def write(folder: Path, table: dict, tensors: dict[str, np.ndarray]) -> Path:
    """Write the folder of a model."""
    from styrax.models.hf import write_tensors

    made = [(key, array.shape, array.dtype, lambda a=array: a) for key, array in tensors.items()]
    write_tensors(folder, made, files={"config.json": json.dumps(table).encode()})
    return folder


def tokens() -> np.ndarray:
    return np.random.default_rng(11).integers(0, 61, (1, LENGTH))


def reference(name: str, folder: Path) -> list[np.ndarray]:
    """Compute the logits of each module by the published equation, with the layers and norms of transformers.

    Module k is at place i given h of module k - 1 (of the model, normalised, for the first) and the embedding of token
    i + k: DeepSeek-AI, "DeepSeek-V3" (2024), equations 21 to 23, in the order of halves of the published weights.

    Args:
        name: Of the case.
        folder: An empty one.

    Returns:
        Of module k: `[1, LENGTH - k, vocab]`.
    """
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    case = case_of(name)
    made = tensors_of(case)
    plain = {key: array for key, array in made.items() if key in cases()[name][0].shapes}

    def theirs(path: Path, tensors: dict) -> "torch.nn.Module":
        given = {"attn_implementation": "eager", "dtype": torch.float32}
        return transformers.AutoModelForCausalLM.from_pretrained(write(path, case.table, tensors), **given).eval()

    model, ids, found = theirs(folder / "model", plain), torch.as_tensor(tokens()), []
    kind = type(model.model.norm)

    def norm(key: str, x: "torch.Tensor") -> "torch.Tensor":
        one = kind(x.shape[-1], eps=case.table["rms_norm_eps"])
        one.load_state_dict({"weight": torch.as_tensor(made[key])})
        return one(x)

    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        for depth, module in enumerate(places(name), 1):
            # A model whose last layer is the module's block, so that transformers itself reads the block's tensors.
            block = {LAST + key.removeprefix(module["block"]): made[key] for key in made if _in_block(key, module)}
            other = theirs(folder / f"block-{depth}", plain | {key: block[key] for key in plain if key in block})
            embedded, hidden = model.model.embed_tokens(ids[:, depth:]), hidden[:, :-1]
            both = torch.cat([norm(module["enorm"], embedded), norm(module["hnorm"], hidden)], -1)
            x = both @ torch.as_tensor(made[module["proj"]]).T
            at = torch.arange(x.shape[1])[None]
            mask = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)[None, None]
            turns = model.model.rotary_emb(x, at)
            hidden = other.model.layers[-1](x, attention_mask=mask, position_ids=at, position_embeddings=turns)
            found.append(model.lm_head(norm(module["norm"], hidden)).numpy())
    return found


def _in_block(key: str, module: dict[str, str]) -> bool:
    return key.startswith(module["block"]) and key not in module.values()


def golden(name: str) -> list[np.ndarray]:
    """Read what `reference` made."""
    with np.load(GOLDEN) as found:
        return [found[f"{name}/{number}"] for number in range(MODULES[name])]
