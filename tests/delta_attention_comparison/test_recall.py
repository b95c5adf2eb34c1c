"""The recall task is what it says: answers can be found in the row, every key is asked for, nothing else is."""

import numpy as np
import pytest

from delta_attention_comparison.recall import BLANK, UNASKED, Budget, Task, count, draw_rows, init, mlp_width


@pytest.mark.parametrize("pairs", [1, 2, 5, 8])
def test_answers_are_recoverable_from_the_row(pairs: int) -> None:
    task = Task(pairs=(2, 8), keys=12, values=9)
    tokens, answers = draw_rows(task, np.random.default_rng(0), np.full(20, pairs))
    assert tokens.shape == answers.shape == (20, 24)
    for row, asked in zip(tokens, answers, strict=True):
        memory = dict(zip(row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
        assert len(memory) == pairs
        queries = row[-pairs:]
        assert sorted(queries) == sorted(memory)
        assert [memory[key] for key in queries] == list(asked[-pairs:])
        assert np.all(asked[:-pairs] == UNASKED)
        assert np.all(row[2 * pairs : -pairs] == BLANK)


def test_words_are_keys_values_or_blank() -> None:
    task = Task(pairs=(4,), keys=5, values=7)
    tokens, answers = draw_rows(task, np.random.default_rng(1), np.full(50, 4))
    assert set(np.unique(tokens)) <= set(range(task.vocabulary))
    assert set(np.unique(tokens[:, 0:8:2])) == set(range(1, 6))
    assert set(np.unique(answers[:, -4:])) == set(range(6, 13))
    assert task.chance == 1 / 7


def test_rows_differ_and_the_same_seed_gives_the_same_rows() -> None:
    task = Task()
    one, again = (draw_rows(task, np.random.default_rng(3), np.full(8, 4))[0] for _ in range(2))
    np.testing.assert_array_equal(one, again)
    assert len({tuple(row) for row in one}) == 8


def test_more_pairs_than_keys_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"pairs=\(4, 9\) must be from 1 to keys=8, since a row's keys are all different"
    ):
        Task(pairs=(4, 9), keys=8)


def test_every_layer_has_about_as_many_parameters() -> None:
    import jax

    from delta_attention_comparison.contenders import LAYERS, PRESETS, make_layer

    for preset in PRESETS.values():
        budget: Budget = preset.budget
        sizes = []
        for name in LAYERS:
            layer = make_layer(name, budget.d_model, budget.num_heads, budget.head_dim)
            assert mlp_width(layer, budget) > 8
            shapes = jax.eval_shape(lambda key, layer=layer: init(layer, preset.task, budget, key), jax.random.key(0))  # noqa: B023
            sizes.append(count(shapes))
        assert max(sizes) < 1.02 * min(sizes)
