"""Documents that share a row do not see each other, from the packing to the logits."""

import numpy as np
import pytest
from flax import nnx

from styrax.core import Policy
from styrax.data import ByteTokenizer, LMData, write_store
from styrax.models import DecoderConfig

MODEL = DecoderConfig(num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64)
LONGEST = {"best_fit": 60, "concat": 90}


def packed(folder, texts, pack):
    store = write_store(folder, texts, ByteTokenizer())
    return LMData(store, seed=2, seq_len=64, batch_size=4, pack=pack, held_out=0)


@nnx.jit
def logits(model, batch):
    return model(batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"])


@nnx.jit
def blind(model, batch):
    return model(batch["tokens"], positions=batch["positions"])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("pack", ["best_fit", "concat"])
def test_changing_one_document_leaves_the_others_logits_as_they_are(tmp_path, pack, dtype):
    rng = np.random.default_rng(0)
    texts = {f"doc/{i}": "".join(rng.choice(list("abcdef "), rng.integers(5, LONGEST[pack]))) for i in range(60)}
    data = packed(tmp_path / "before", texts, pack)
    model = MODEL.build(vocab_size=data.vocab_size, rngs=nnx.Rngs(0), policy=Policy.parse(dtype))
    for step in range(3):
        rows = [data.provenance(step, row) for row in range(4)]
        row = next(row for row, spans in enumerate(rows) if len({span.document for span in spans}) > 1)
        spans, first = rows[row], rows[row][0].document
        # A document of the same length in the place of the row's first one: everything else stays where it is.
        changed = packed(tmp_path / f"after-{step}", {**texts, first: texts[first].upper().replace(" ", "_")}, pack)
        assert changed.provenance(step, row) == spans
        before, after = data.batch(step), changed.batch(step)
        for name in ("segment_ids", "positions", "loss_mask"):
            np.testing.assert_array_equal(before[name], after[name])
        for run, apart in ((logits, True), (blind, False)):
            one, other = np.asarray(run(model, before))[row], np.asarray(run(model, after))[row]
            assert np.isfinite(one[before["segment_ids"][row] > 0].astype(np.float32)).all()
            for number, span in enumerate(spans, 1):
                here = before["segment_ids"][row] == number
                assert here.sum() == span.length
                equal = one[here].tobytes() == other[here].tobytes()
                # Without segment ids the others do change, so the comparison can tell.
                assert equal == (apart and span.document != first), (step, span)
