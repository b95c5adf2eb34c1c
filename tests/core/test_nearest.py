"""Errors about unknown names end with the name that was meant."""

import pytest

import tilewright
from tilewright import configs
from tilewright.core.nearest import did_you_mean
from tilewright.models.train_config import TrainConfig, TrainConfigError


def test_the_nearest_name_is_named_and_a_far_one_is_not() -> None:
    known = ("float32", "bfloat16", "pallas_tpu")
    assert did_you_mean("bf16", known) == "; did you mean bfloat16?"
    assert did_you_mean("Pallas-TPU", known) == "; did you mean pallas_tpu?"
    assert did_you_mean("cuda", known) == ""
    assert did_you_mean(None, known) == ""


def test_names_of_the_library_are_answered_with_it() -> None:
    with pytest.raises(ValueError, match=r"use one of .*; did you mean v6e\?$"), tilewright.target("v6"):
        pass
    with pytest.raises(ValueError, match=r"its fields are block_n, .*; did you mean block_n\?$"):
        configs.from_json({"config": "NormTpuForward", "blok_n": 8})
    with pytest.raises(ValueError, match=r"see tilewright.configs; did you mean NormTpuForward\?$"):
        configs.from_json({"config": "NormTPUForwards"})
    with pytest.raises(TrainConfigError, match=r"\[optimiser\] is not known; .*; did you mean optimizer\?$"):
        TrainConfig.of({"optimiser": {}})
