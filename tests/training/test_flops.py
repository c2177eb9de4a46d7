"""The count of operations follows what layers see."""

import numpy as np
import pytest

from purelora.training import flops
from tests.support import tiny


@pytest.mark.parametrize(("window", "length"), [(None, 512), (64, 512), (512, 512), (4096, 512)])
def test_scores_are_counted_over_the_keys_that_a_token_sees(window, length):
    m = tiny.with_lora(tiny.model())

    def count(windows):
        return flops.per_token(
            m.flat_infos,
            {},
            trained_weights=(),
            experts_share=1.0,
            attention_widths=[40] * len(windows),
            windows=windows,
            length=length,
        )

    seen = np.minimum(np.arange(1, length + 1), window or length).mean()
    # Two products of scores, forward, and twice as many backward; two operations each.
    wanted = 2 * 2 * 3 * 40 * seen
    np.testing.assert_allclose(count([window]) - count([]), wanted, rtol=1 / 64)
    assert count([window, window]) - count([window]) == count([window]) - count([])
