"""Arithmetic of training a token, counted pair by pair."""

import pytest

from styrax.models import DecoderConfig
from styrax.models.arch import Arch, Attn
from styrax.models.cost import cost_of


@pytest.mark.parametrize("length", [1, 5, 12])
def test_both_conventions_count_pairs_of_tokens(length):
    window = 4
    arch = Arch(local=Attn(window=window), layers=("local", "attn"))
    config = DecoderConfig(num_layers=2, embed_dim=32, num_heads=2, mlp_dim=64, arch=arch)
    seen = sum(min(query + 1, window) + query + 1 for query in range(length)) / length
    most = min(length, window) + length
    matrices = 6 * cost_of(config, vocab_size=100).active
    each = 3 * 4 * 32  # forward and twice backward; scores and values cost two operations for each of 32 numbers
    assert config.train_flops_per_token(vocab_size=100, length=length) == {
        "causal": pytest.approx(matrices + each * seen),
        "full": pytest.approx(matrices + each * most),
    }
