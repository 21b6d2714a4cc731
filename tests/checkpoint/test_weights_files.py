"""The kinds of weights in order of precedence."""

import pytest

from distribuuuu.checkpoint.weights_files import common_kind


@pytest.mark.parametrize(
    ("records", "kind"),
    [
        ([{"raw": {}, "ema": {}}, {"ema": {}, "raw": {}}], "ema"),
        ([{"ema": {}, "raw": {}}, {"raw": {}}], "raw"),
        ([{}], "raw"),
    ],
)
def test_an_average_precedes_if_every_record_has_one(records, kind):
    assert common_kind(records) == kind
