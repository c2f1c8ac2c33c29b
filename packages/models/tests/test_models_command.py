"""`styrax models`."""

import json

import numpy as np
import pytest
from families import cases, write

from styrax.core.cli import main
from styrax.models.hf import open_tensors, write_tensors

CASES = cases()


@pytest.fixture
def styrax(capsys):
    def call(*arguments, code=0):
        assert main(["models", *map(str, arguments)]) == code
        out, err = capsys.readouterr()
        return out if code == 0 else err

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = write(CASES["gemma3"][0], tmp_path_factory.mktemp("model") / "gemma3")
    (made / "tokenizer.json").write_text("{}")
    return made


def test_list_and_show(styrax, folder):
    listed = json.loads(styrax("list", "--json"))
    assert listed["llama"] == "LlamaForCausalLM"
    found = json.loads(styrax("show", folder, "--json", "--tree", "--mesh", "fsdp=2", "--dtype", "f32"))
    assert found["parameters"] == sum(int(np.prod(shape)) for shape, _ in CASES["gemma3"][0].shapes.values())
    assert found["tree"]["embed/embedding"]["bytes_per_device"] == found["tree"]["embed/embedding"]["bytes"] // 2
    text = styrax("show", folder)
    assert "8 (7 local, 1 attn)" in text
    assert "61 tokens, head tied" in text


def test_convert_and_verify(styrax, folder, tmp_path):
    assert "compared bit by bit" in styrax(
        "convert", folder, tmp_path / "out", "--dtype", "bf16", "--shard-size", "50kB"
    )
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert "all finite" in styrax("verify", tmp_path / "out")
    assert "bfloat16[61, 32] here, float32[61, 32] there" in styrax(
        "verify", tmp_path / "out", "--against", folder, code=1
    )
    styrax("convert", folder, tmp_path / "again")
    assert "the same as in" in styrax("verify", tmp_path / "again", "--against", folder)
    assert "already" in styrax("convert", folder, tmp_path / "again", code=1)
    styrax("convert", folder, tmp_path / "again", "--overwrite")


def test_what_is_wrong_is_said(styrax, folder, tmp_path):
    with open_tensors(folder) as tensors:
        made = {name: np.array(tensor.read()) for name, tensor in tensors.items()}
    made["model.norm.weight"][3] = np.nan
    rows = ((name, array.shape, array.dtype, lambda array=array: array) for name, array in made.items())
    write_tensors(tmp_path / "bad", rows, files={"config.json": (folder / "config.json").read_bytes()})
    assert "model.norm.weight: 1 of 32 numbers are not finite" in styrax("verify", tmp_path / "bad", code=1)
    assert "No such file" in styrax("show", tmp_path / "none", code=1)
    assert "expected AXIS=N" in styrax("show", folder, "--mesh", "fsdp", code=2)
    assert "expected a size such as 5GB" in styrax("convert", folder, tmp_path / "x", "--shard-size", "many", code=2)
    assert "invalid choice: 'shwo'" in styrax("shwo", code=2)
