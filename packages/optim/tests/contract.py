"""Every optimizer, as a function of the parameters; `test_contract.py` holds each to the same laws."""

import jax
import optax

from styrax.optim import AdamW, adamw, guard
from styrax.optim.adafactor import adafactor
from styrax.optim.adam_mini import adam_mini
from styrax.optim.ademamix import ademamix
from styrax.optim.agc import agc
from styrax.optim.averaging import averaged
from styrax.optim.cautious import cautious
from styrax.optim.eight_bit import eight_bit_adamw
from styrax.optim.groups import groups
from styrax.optim.kron import kron
from styrax.optim.lion import lion
from styrax.optim.mars import mars
from styrax.optim.muon import muon
from styrax.optim.precision import precision
from styrax.optim.prodigy import prodigy
from styrax.optim.schedule_free import schedule_free
from styrax.optim.shampoo import shampoo
from styrax.optim.soap import soap
from styrax.optim.specs import specs
from styrax.optim.spikes import Spikes, ZClip


def narrow(mode, make):
    """`precision`, which refuses parameters that are all of 32 bits: those get what is inside."""
    return lambda params: (
        precision(make(), mode) if "bfloat16" in {str(x.dtype) for x in jax.tree.leaves(params)} else make()
    )


CASES = {
    "adamw": lambda params: adamw(1e-2),
    "guarded adamw": lambda params: guard(adamw(1e-2)),
    "guarded optax": lambda params: guard(optax.sgd(1e-2, momentum=0.9)),
    "groups": lambda params: groups(
        {"slow": adamw(1e-3), "plain": optax.sgd(1e-2), "frozen": None},
        {"head/bias": "frozen", "**/scale": "plain", "**": "slow"},
    ),
    "recipe": lambda params: AdamW().build(params, steps=10),
    "lion": lambda params: lion(1e-3),
    "ademamix": lambda params: ademamix(1e-2, warmup=4),
    "schedule_free": lambda params: schedule_free(1e-2, schedule=lambda k: (k + 1) / 8),
    "mars": lambda params: mars(1e-2, specs=specs(params)),
    "cautious": lambda params: cautious(adamw(1e-2, weight_decay=0.0), weight_decay=0.1, cautious_decay=True),
    "averaged": lambda params: averaged(adamw(1e-2), decay=0.9, start=1),
    "muon": lambda params: muon(1e-2, specs=specs(params)),
    "normuon": lambda params: muon(1e-2, specs=specs(params), normalize=True, form="gram", scale="rms"),
    "prodigy": lambda params: prodigy(d0=1e-2, weight_decay=0.1),
    "soap": lambda params: soap(1e-2, specs=specs(params), frequency=2),
    "adafactor": lambda params: adafactor(1e-2, specs=specs(params), min_size=8),
    "adafactor with momentum": lambda params: adafactor(1e-2, specs=specs(params), b1=0.9),
    "adam_mini": lambda params: adam_mini(1e-2, specs=specs(params)),
    "eight_bit": lambda params: eight_bit_adamw(1e-2, specs=specs(params), block=4, min_size=128),
    "shampoo": lambda params: shampoo(1e-2, specs=specs(params), frequency=2),
    "kron": lambda params: kron(1e-2, specs=specs(params)),
    "agc": lambda params: guard(agc(adamw(1e-2), specs=specs(params))),
    "guard with histories": lambda params: guard(adamw(1e-2), zclip=ZClip(warmup=2), spikes=Spikes(window=4)),
    "master": narrow("master", lambda: adamw(1e-2)),
    "split": narrow("split", lambda: adamw(1e-2)),
    "stochastic": narrow("stochastic", lambda: adamw(1e-2)),
    "kahan around optax": narrow("kahan", lambda: optax.sgd(1e-2, momentum=0.9)),  # its compensation is in bfloat16
}
