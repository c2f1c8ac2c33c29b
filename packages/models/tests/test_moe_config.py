import pytest

from styrax.core.config import build
from styrax.models.moe_config import Groups, MoE, Routing, Shared


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"num_experts": 2, "experts_per_token": 3}, ["experts_per_token: expected at most num_experts = 2, got 3"]),
        ({"num_experts": 8, "routing": Routing(groups=Groups(num=3, kept=1))}, ["a divisor of num_experts = 8, got 3"]),
        (
            {"num_experts": 4, "experts_per_token": 5, "routing": Routing(groups=Groups(num=4, kept=1, score="top2"))},
            ["experts_per_token: expected at most", "keeps 1 groups of 1 experts", "groups of 2 experts or more"],
        ),
        ({"activation": "gelu_tan", "dispatch": "dens"}, ["did you mean 'gelu_tanh'?", "did you mean 'dense'?"]),
        ({"capacity_factor": 0.0, "expert_dim": 0}, ["capacity_factor: expected number > 0.0", "expert_dim: expected"]),
    ],
)
def test_a_wrong_config_lists_all_problems(fields, lines):
    with pytest.raises(ValueError) as caught:
        MoE(**fields)
    assert len(str(caught.value).splitlines()) == len(lines)
    assert all(line in str(caught.value) for line in lines), str(caught.value)


def test_wrong_groups():
    with pytest.raises(ValueError, match="kept: expected at most num = 2, got 3"):
        Groups(num=2, kept=3)


def test_from_plain_values():
    given = {"num_experts": 4, "routing": {"score": "sigmoid", "groups": {"num": 2, "kept": 1}}, "shared": {"dim": 8}}
    made = MoE(num_experts=4, routing=Routing(score="sigmoid", groups=Groups(num=2, kept=1)), shared=Shared(dim=8))
    assert build(MoE, given) == made
