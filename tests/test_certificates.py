"""benchmarks/certificates.py: our loop and the components of references give the same weights, and differences show."""

import subprocess
import sys

import pytest
from support.runs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import certificates  # noqa: E402

pytestmark = pytest.mark.slow
NAMES = list(certificates.CERTIFICATES)
# The benchmark trains 50 steps, the tests 30: with 10 in an epoch, each schedule has changed the rate by then.
NUM_STEPS = 30
HAS_AVERAGE = {name: entry.reference.average_decay is not None for name, entry in certificates.CERTIFICATES.items()}
# Each difference in one certificate: the first one that has an average.
PLANTED = [(next(name for name in NAMES if HAS_AVERAGE[name]), planted) for planted in certificates.PLANTED]


@pytest.mark.parametrize("name", NAMES)
def test_the_loop_trains_as_the_reference(name):
    found = certificates.certify(name, NUM_STEPS)
    assert found.steps == NUM_STEPS and found.largest <= certificates.CERTIFICATES[name].tolerance, found


@pytest.mark.parametrize(("name", "planted"), PLANTED)
def test_a_planted_difference_is_found(name, planted):
    found = certificates.certify(name, NUM_STEPS, planted)
    assert found.largest > certificates.CERTIFICATES[name].tolerance, found


def test_wrong_arguments_are_one_line():
    for words, message in ((["no such"], "unknown certificate 'no such'"), (["--steps", "25"], "a multiple of 10")):
        done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "certificates.py"), *words],
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 2 and message in done.stderr.splitlines()[-1]
