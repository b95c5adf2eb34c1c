"""The layers with the weights of the golden models: logits of whole sequences and of chunks, and generated tokens."""

import numpy as np
import pytest

from tests.layers.plain_models import KimiLinear, Model, Qwen3, Qwen3Next

every_model = pytest.mark.parametrize("model", [Qwen3, Qwen3Next, KimiLinear])
# Logits are about 1. All layers sum in float32 in a different order than torch.
TOLERANCE = 1e-4


@every_model
def test_logits_of_whole_sequences(model: type[Model]) -> None:
    held = model()
    logits = held.read(held.golden["input_ids"])
    np.testing.assert_allclose(logits, held.golden["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@every_model
def test_logits_in_chunks(model: type[Model]) -> None:
    held = model()
    held.implementation = "reference"
    ids = held.golden["input_ids"]
    logits = np.concatenate([held.read(part) for part in np.split(ids, [38, 76], axis=1)], axis=1)
    np.testing.assert_allclose(logits, held.golden["logits"], rtol=0, atol=TOLERANCE)


@every_model
def test_greedy_tokens_one_at_a_time(model: type[Model]) -> None:
    """The prompt in one call, then one token per call, through the steps and a fixed cache."""
    held = model()
    held.implementation = "reference"
    generated = held.golden["generated"]
    prompt = 16
    logits = held.read(generated[:, :prompt])
    held.reserve(generated.shape[1])
    tokens = [np.argmax(logits[:, -1], axis=-1)]
    while prompt + len(tokens) < generated.shape[1]:
        logits = held.read(tokens[-1][:, None])
        tokens.append(np.argmax(logits[:, -1], axis=-1))
    np.testing.assert_array_equal(np.stack(tokens, axis=1), generated[:, prompt:])
