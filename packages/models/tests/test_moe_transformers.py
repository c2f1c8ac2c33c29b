import jax
import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import Policy, tree
from styrax.models.layers.moe import Mixture
from styrax.models.layers.router import Router, balance_loss
from styrax.models.moe_config import Clamped, Groups, MoE, Routing, Shared

DIM, TOKENS = 6, 16


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def filled(module):
    """Fill a torch module with random numbers, buffers too, for its own initial values hide mistakes."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(0.6 * torch.randn(tensor.shape, generator=generator))
    return module.eval()


def fused(experts, *, transposed, interleaved=False):
    """Take the kernels of all experts out of a module that keeps gate and up as one."""
    both, down = experts.gate_up_proj.detach().numpy(), experts.down_proj.detach().numpy()
    if transposed:
        both, down = both.swapaxes(1, 2), down.swapaxes(1, 2)
    gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else np.split(both, 2, axis=-1)
    return {"experts/gate/kernel": gate, "experts/up/kernel": up, "experts/down/kernel": down}


def shared_kernels(module):
    return {
        f"shared/{name}/kernel": getattr(module, f"{name}_proj").weight.detach().numpy().T
        for name in ("gate", "up", "down")
    }


SIZES = {"hidden_size": DIM, "num_experts_per_tok": 3, "num_attention_heads": 1}


def mixtral():
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    block = filled(MixtralSparseMoeBlock(MixtralConfig(**SIZES, num_local_experts=8, intermediate_size=5)))
    return block, block.gate, MoE(experts_per_token=3, expert_dim=5), fused(block.experts, transposed=True)


def qwen2_moe():
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeSparseMoeBlock

    given = {
        "num_experts": 8,
        "moe_intermediate_size": 5,
        "shared_expert_intermediate_size": 7,
        "norm_topk_prob": False,
    }
    block = filled(Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(**SIZES, **given)))
    config = MoE(
        experts_per_token=3, expert_dim=5, routing=Routing(renormalise=False), shared=Shared(dim=7, gated=True)
    )
    gate = {"shared_gate/kernel": block.shared_expert_gate.weight.detach().numpy().T}
    kernels = fused(block.experts, transposed=True) | shared_kernels(block.shared_expert) | gate
    return block, block.gate, config, kernels


def qwen3_moe():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    given = {"num_experts": 8, "moe_intermediate_size": 5, "norm_topk_prob": True, "hidden_act": "gelu"}
    block = filled(Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**SIZES, **given)))
    config = MoE(experts_per_token=3, expert_dim=5, activation="gelu")
    return block, block.gate, config, fused(block.experts, transposed=True)


def gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssMLP

    block = filled(GptOssMLP(GptOssConfig(**SIZES, num_local_experts=8, intermediate_size=5, swiglu_limit=1.0)))
    config = MoE(
        experts_per_token=3, expert_dim=5, routing=Routing(bias=True), expert_bias=True, clamped=Clamped(limit=1.0)
    )
    both = block.experts.gate_up_proj_bias.detach().numpy()
    biases = {
        "router/bias": block.router.bias.detach().numpy(),
        "experts/gate/bias": both[:, ::2],
        "experts/up/bias": both[:, 1::2],
        "experts/down/bias": block.experts.down_proj_bias.detach().numpy(),
    }
    kernels = fused(block.experts, transposed=False, interleaved=True) | biases
    return block, block.router, config, kernels


def deepseek_v2(method="group_limited_greedy"):
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2Moe

    given = {"n_routed_experts": 8, "moe_intermediate_size": 5, "n_shared_experts": 2, "routed_scaling_factor": 1.7}
    groups = {"n_group": 4, "topk_group": 2, "topk_method": method}
    block = filled(DeepseekV2Moe(DeepseekV2Config(**SIZES, **given, **groups)))
    routing = Routing(renormalise=False, scale=1.7, groups=None if method == "greedy" else Groups(num=4, kept=2))
    config = MoE(experts_per_token=3, expert_dim=5, routing=routing, shared=Shared(dim=10))
    kernels = fused(block.experts, transposed=True) | shared_kernels(block.shared_experts)
    return block, block.gate, config, kernels


def deepseek_v2_greedy():
    return deepseek_v2("greedy")


def deepseek_v3():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    given = {"n_routed_experts": 8, "moe_intermediate_size": 5, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
    block = filled(DeepseekV3MoE(DeepseekV3Config(**SIZES, **given, n_group=4, topk_group=2, norm_topk_prob=True)))
    routing = Routing(score="sigmoid", correction=True, scale=2.5, groups=Groups(num=4, kept=2, score="top2"))
    config = MoE(experts_per_token=3, expert_dim=5, routing=routing, shared=Shared(dim=5))
    correction = {"router/correction": block.gate.e_score_correction_bias.numpy()}
    kernels = fused(block.experts, transposed=True) | shared_kernels(block.shared_experts) | correction
    return block, block.gate, config, kernels


def llama4():
    from transformers.models.llama4.modeling_llama4 import Llama4TextConfig, Llama4TextMoe

    block = filled(Llama4TextMoe(Llama4TextConfig(**SIZES, num_local_experts=8, intermediate_size=5)))
    routing = Routing(score="sigmoid", renormalise=False)
    config = MoE(experts_per_token=3, expert_dim=5, routing=routing, input_scaled=True, shared=Shared(dim=5))
    kernels = fused(block.experts, transposed=False) | shared_kernels(block.shared_expert)
    return block, block.router, config, kernels


def gemma4():
    import torch
    from transformers.models.gemma4 import modeling_gemma4 as module

    text = module.Gemma4TextConfig(
        hidden_size=DIM, num_experts=8, top_k_experts=3, moe_intermediate_size=5, rms_norm_eps=1e-3
    )

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = module.Gemma4TextRouter(text), module.Gemma4TextExperts(text)

        def forward(self, x):
            rows = x.reshape(-1, DIM)
            _, weights, experts = self.router(rows)
            return self.experts(rows, experts, weights).reshape(x.shape)

    block = filled(Both())
    routing = Routing(norm_eps=1e-3, expert_scale=True)
    config = MoE(experts_per_token=3, expert_dim=5, routing=routing, activation="gelu_tanh")
    scales = {
        "router/scale": block.router.scale.detach().numpy(),
        "router/expert_scale": block.router.per_expert_scale.detach().numpy(),
    }
    return block, block.router.proj, config, fused(block.experts, transposed=True) | scales


BLOCKS = [
    mixtral,
    qwen2_moe,
    qwen3_moe,
    gpt_oss,
    deepseek_v2,
    deepseek_v2_greedy,
    deepseek_v3,
    llama4,
    gemma4,
]


@pytest.mark.parametrize("kind", ["dense", "dropless"])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_against_transformers(block, kind):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    module, router, config, kernels = block()
    kernels["router/kernel"] = router.weight.detach().numpy().T
    config = MoE(**{name: getattr(config, name) for name in MoE.__dataclass_fields__} | {"dispatch": kind})
    layer = Mixture(DIM, config, std=1.0, residual_std=1.0, policy=Policy(), key=jax.random.key(0))
    assert kernels.keys() == tree.flatten(layer).keys()
    layer = tree.map_with_path(lambda path, _: jnp.asarray(np.array(kernels[path])), layer)
    x = normal(2, TOKENS // 2, DIM, seed=1)
    with torch.no_grad():
        expected = module(torch.from_numpy(np.array(x)))
    expected = (expected[0] if isinstance(expected, tuple) else expected).numpy().reshape(x.shape)
    got, _ = jax.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(got, expected, atol=3e-5 * np.abs(expected).max())


def test_balance_loss_against_transformers():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    router = Router(DIM, MoE(experts_per_token=3), std=0.6, policy=Policy(), key=jax.random.key(0))
    x, mask = normal(TOKENS, DIM, seed=1), np.arange(TOKENS) < 11
    logits = torch.from_numpy(np.array(x @ router.kernel[...]))
    expected = load_balancing_loss_func((logits,), 8, 3, torch.from_numpy(mask)[None])
    assert 3 * balance_loss(router(x, jnp.asarray(mask))[1]) == pytest.approx(float(expected), rel=1e-5)
