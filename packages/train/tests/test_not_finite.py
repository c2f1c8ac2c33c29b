"""What a run that went wrong says of what is left of it."""

import optax
import pytest
from train_toys import MemoryCheckpointer, Toy, ToyData, toy_loss

from styrax.core import UserError
from styrax.train import fit


def explode(**options):
    with pytest.raises(UserError, match="is not finite since step") as caught:
        fit(lambda rngs: Toy(rngs), optax.sgd(1e25), ToyData(), toy_loss, steps=9, **options)
    return str(caught.value)


def test_a_loss_that_is_not_finite_says_what_was_saved():
    assert explode().endswith("nothing was saved, so start anew with the change")
    checkpointer = MemoryCheckpointer()
    assert explode(checkpointer=checkpointer, save_every=1).endswith(
        f"the newest checkpoint is of step {checkpointer.latest()}"
    )
