"""How softmax attention is computed: implementations by name, and the choice among them; importing it costs no jax."""

from styrax.models.attention.call import Call
from styrax.models.attention.registry import AUTO, Implementation, check_name, choose, get, names, register

__all__ = ["AUTO", "Call", "Implementation", "check_name", "choose", "get", "names", "register"]
