"""What `tilewright bench` runs: arrays that an op updates in place are not copied."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewright.core.dispatch import find_op
from tilewright.workbench.bench import Metrics, Timing, compile_case, time_case


def test_caches_are_passed_from_call_to_call() -> None:
    op = find_op("decode_qkv")
    case = op.case("plain")
    compiled = compile_case(op, case, "reference", "float32", "forward")
    arrays = case.draw("float32")
    first = compiled.program.run(arrays, ())
    keys = np.array(first["keys"])
    second = compiled.program.run(arrays, ())
    np.testing.assert_array_equal(second["keys"], keys)
    assert first["keys"].is_deleted()
    assert not first["q"].is_deleted()
    assert not any(array.is_deleted() for array in arrays.values())
    seen: dict[str, float] = {}

    def judge(results: Mapping[str, Any]) -> Metrics:
        seen.update({name: float(np.abs(np.asarray(array)).sum()) for name, array in results.items()})
        return {}

    record = time_case(compiled, Timing(seconds=0.01), judge)
    assert set(seen) == {"q", "keys", "values"}
    assert record.samples_s
