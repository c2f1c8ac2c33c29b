"""Models from GGUF files: against transformers, with files of the gguf package, and against what was written."""

import struct

import jax
import numpy as np
import pytest

from styrax.core import UserError, tree
from styrax.models.hf.gguf_config import KINDS
from styrax.models.hf.load_gguf import from_gguf

VOCAB, LAYERS, DIM, HEADS, KV_HEADS, WIDTH, MLP = 40, 2, 32, 4, 2, 8, 64
SIZES = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": DIM,
    "feed_forward_length": MLP,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key, value):
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    return text(key) + (struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value))


def write(path, metadata, tensors, kind=0):
    """Write arrays as float32, the first ones of each name as they are."""
    records, data = b"", b""
    for name, array in tensors.items():
        array = np.ascontiguousarray(array, np.float32)
        shape = array.shape[::-1]
        records += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += array.tobytes() + bytes(-array.nbytes % 32)
    entries = b"".join(entry(key, value) for key, value in metadata.items())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + entries + records
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def llama_tensors(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "attn_norm": (DIM,),
        "attn_q": (HEADS * WIDTH, DIM),
        "attn_k": (KV_HEADS * WIDTH, DIM),
        "attn_v": (KV_HEADS * WIDTH, DIM),
        "attn_output": (DIM, HEADS * WIDTH),
        "ffn_norm": (DIM,),
        "ffn_gate": (MLP, DIM),
        "ffn_up": (MLP, DIM),
        "ffn_down": (DIM, MLP),
    }
    found = {"token_embd.weight": (VOCAB, DIM), "output_norm.weight": (DIM,)}
    found |= {f"blk.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in found.items()}


def metadata(arch="llama", **changes):
    sizes = {**SIZES, **{key.replace("__", "."): value for key, value in changes.items()}}
    return {"general.architecture": arch} | {
        f"{arch}.{key}": value for key, value in sizes.items() if value is not None
    }


def test_every_tensor_comes_to_its_place(tmp_path):
    """Row `2 i + j` of a head in the file is row `i + j d / 2` of ours, for q and k and nothing else."""
    tensors = llama_tensors()
    model = from_gguf(write(tmp_path / "m.gguf", metadata(), tensors))
    found = tree.flatten(model)
    assert model.config.tied and model.config.max_len == 128 and model.config.arch.norm.eps == 1e-5
    np.testing.assert_array_equal(found["embed/embedding"], tensors["token_embd.weight"])
    np.testing.assert_array_equal(found["final_norm/scale"], tensors["output_norm.weight"])
    order = np.array([2 * (row % 4) + row // 4 for row in range(WIDTH)])
    for layer in range(LAYERS):
        for name, path, heads in (
            ("attn_q", "attn/q", HEADS),
            ("attn_k", "attn/k", KV_HEADS),
            ("attn_v", "attn/v", None),
            ("ffn_down", "mlp/down", None),
        ):
            wanted = tensors[f"blk.{layer}.{name}.weight"]
            if heads:
                wanted = wanted.reshape(heads, WIDTH, DIM)[:, order].reshape(-1, DIM)
            np.testing.assert_array_equal(found[f"layers/{path}/kernel"][layer], wanted.T, err_msg=name)


def test_an_own_head_and_dtypes(tmp_path):
    tensors = llama_tensors() | {"output.weight": np.eye(VOCAB, DIM)}
    path = write(tmp_path / "m.gguf", metadata(), tensors)
    model = from_gguf(path, dtype="bf16", remat="none")
    assert not model.config.tied and model.config.remat == "none"
    assert {leaf.dtype.name for leaf in tree.flatten(model).values()} == {"bfloat16"}
    assert model.policy.compute == "bfloat16"
    np.testing.assert_array_equal(np.asarray(model.head.kernel[...], np.float32), np.eye(DIM, VOCAB))
    assert from_gguf(path, compute="bf16").policy.param == "float32"


def test_shards(tmp_path):
    path = write(tmp_path / "m.gguf", metadata(), llama_tensors())
    mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed, plain = (tree.flatten(from_gguf(path, **given)) for given in ({"mesh": mesh}, {}))
    for name, leaf in placed.items():
        assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
        np.testing.assert_array_equal(leaf, plain[name])


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"arch": "mamba"}, ["general.architecture 'mamba' is not known", "known are llama, qwen2, qwen3, gemma2"]),
        (
            {"embedding_length": None, "block_count": None},
            ["llama.block_count is missing", "llama.embedding_length is"],
        ),
        ({"expert_count": 8}, ["llama.expert_count = 8 is not known here"]),
        ({"rope__scaling__type": "odd"}, ["rope.scaling.type 'odd': expected none, linear, yarn"]),
        ({"rope__dimension_count": 4}, ["llama.rope.dimension_count = 4: expected all 8 channels"]),
        ({"attention__value_length": 4}, ["keys are 8 wide and values 4"]),
        ({"attention__head_count": "four"}, ["llama.attention.head_count: expected a number, the same for all layers"]),
        (
            {"block_count": 3},
            ["missing: model.layers.2.self_attn.q_proj.weight", "missing: model.layers.2.mlp.up_proj"],
        ),
        ({"block_count": 1}, ["not in the model: model.layers.1.self_attn.q_proj.weight"]),
        ({"feed_forward_length": 65}, ["model.layers.0.mlp.up_proj.weight: expected shape [65, 32], got [64, 32]"]),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, messages):
    path = write(tmp_path / "m.gguf", metadata(**changes), llama_tensors())
    with pytest.raises(UserError) as caught:
        from_gguf(path)
    for message in messages:
        assert message in str(caught.value)


def test_unknown_and_missing_tensors_are_refused(tmp_path):
    tensors = llama_tensors() | {"blk.0.odd.weight": np.zeros(3), "blk.0.attn_sinks.weight": np.zeros(4)}
    del tensors["output_norm.weight"]
    with pytest.raises(UserError) as caught:
        from_gguf(write(tmp_path / "m.gguf", metadata(expert_count=0), tensors))
    for line in ("not in the model: blk.0.odd.weight [3]", "blk.0.attn_sinks.weight [4]", "missing: model.norm.weight"):
        assert line in str(caught.value)
    with pytest.raises(UserError, match="from_gguf: remat"):
        from_gguf(write(tmp_path / "m.gguf", metadata(), llama_tensors()), remat="sometimes")


def test_a_kind_that_is_not_read_is_said_before_loading(tmp_path):
    path = write(tmp_path / "m.gguf", metadata(), {})
    with pytest.raises(UserError, match=r"token_embd\.weight is missing"):
        from_gguf(path)
    entries = b"".join(entry(key, value) for key, value in metadata(embedding_length=256).items())
    record = text("token_embd.weight") + struct.pack("<I2QIQ", 2, 256, 1, 10, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(metadata())) + entries + record
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(96))
    with pytest.raises(UserError, match="'Q2_K' are not read here"):
        from_gguf(path)


def test_other_rotations(tmp_path):
    divisors = np.array([1.0, 1.0, 2.0, 5.0], np.float32)
    cases = [
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {}, {"kind": "linear", "factor": 4.0}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32},
            {},
            {"kind": "yarn", "factor": 4.0, "original_max_len": 32},
        ),
        ({}, {"rope_freqs.weight": divisors}, {"kind": "longrope", "attention_factor": 1.0}),
    ]
    for changes, more, wanted in cases:
        rope = from_gguf(write(tmp_path / "m.gguf", metadata(**changes), llama_tensors() | more)).config.rope
        assert {name: getattr(rope, name) for name in wanted} == wanted
    assert rope.longrope.short_factor == rope.longrope.long_factor == (1.0, 1.0, 2.0, 5.0)


# ---------------------------------------------------------------- against transformers, in files of the gguf package

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
PHI3_FACTORS = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 6.0]}
THEIRS = {
    "llama": ("llama", {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "llama3": (
        "llama",
        {"num_hidden_layers": 2, "tie_word_embeddings": True, "head_dim": 16, "rope_parameters": LLAMA3},
    ),
    "qwen2": ("qwen2", {"num_hidden_layers": 2}),
    "qwen3": ("qwen3", {"num_hidden_layers": 2, "head_dim": 16}),
    "gemma2": ("gemma2", {"num_hidden_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6},
    ),
    "phi3": (
        "phi3",
        {
            "num_hidden_layers": 2,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                **PHI3_FACTORS,
            },
            "original_max_position_embeddings": 16,
        },
    ),
}


def llama_cpp_rows(values, heads):
    """What llama.cpp's converter does to queries and keys, by its formula."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def convert(model, config, arch, path):
    """Write a model of transformers as llama.cpp's converter does, names from the gguf package."""
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1.0)))
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope["rope_type"] == "llama3":
        inv = model.model.rotary_emb.inv_freq.numpy()
        plain = rope["rope_theta"] ** (-np.arange(0, width, 2) / width)
        writer.add_tensor("rope_freqs.weight", (plain / inv).astype(np.float32))
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(float(model.model.rotary_emb.attention_scaling))
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = values.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = llama_cpp_rows(
                values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            )
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", THEIRS)
def test_logits_are_those_of_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model_type, changes = THEIRS[name]
    arch = {"gemma3_text": "gemma3"}.get(model_type, model_type)
    assert arch in KINDS
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **changes})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for key, values in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                values += 0.1 * torch.randn_like(values)
    convert(model, config, arch, tmp_path / "m.gguf")
    tokens = np.random.default_rng(0).integers(1, VOCAB, (2, 40))
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens)).logits.numpy()
    with jax.default_matmul_precision("highest"):
        ours = jax.jit(lambda model, tokens: model(tokens))(from_gguf(tmp_path / "m.gguf"), tokens)
    np.testing.assert_allclose(ours, wanted, atol=2e-4 * max(1, np.abs(wanted).max()))
