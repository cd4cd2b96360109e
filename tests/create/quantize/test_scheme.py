"""Schemes: what may be said, what is refused, and that a scheme survives being written down."""

import pytest

from sparta.create.quantize import PRESETS, QuantizationArgs, Scheme
from sparta.errors import NameNotFoundError, ValueRangeError


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_scheme_survives_plain_values(name):
    assert Scheme.of(Scheme.of(name).to_dict()) == PRESETS[name]
    assert str(PRESETS[name])


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_symmetric_grid_is_its_own_mirror_image_and_an_asymmetric_one_uses_every_integer(bits):
    symmetric, asymmetric = QuantizationArgs(bits), QuantizationArgs(bits, symmetric=False)
    assert symmetric.quant_min == -symmetric.quant_max
    assert asymmetric.quant_max - asymmetric.quant_min + 1 == 2**bits
    for args in (symmetric, asymmetric):
        assert args.format.bits >= bits


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"num_bits": 9}, ValueRangeError, "2 to 8"),
        ({"num_bits": True}, ValueRangeError, "2 to 8"),
        ({"symmetric": "yes"}, ValueRangeError, "true or false"),
        ({"strategy": "chanel"}, NameNotFoundError, "did you mean 'channel'"),
        ({"averaging": 0}, ValueRangeError, "above 0"),
    ],
)
def test_wrong_arguments_are_refused(fields, error, text):
    with pytest.raises(error, match=text):
        QuantizationArgs(**fields)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("deepspars", NameNotFoundError, "did you mean 'deepsparse'"),
        ({"weight": {}}, NameNotFoundError, "did you mean 'weights'"),
        ({"weights": {"bits": 8}}, NameNotFoundError, "did you mean 'num_bits'"),
        ({"weights": 8}, ValueRangeError, "a mapping"),
        ({"input_activations": {"strategy": "channel"}}, ValueRangeError, "'tensor'"),
        ({"weights": None}, ValueRangeError, "quantises nothing"),
        (8, ValueRangeError, "a preset's name"),
    ],
)
def test_wrong_schemes_are_refused(given, error, text):
    with pytest.raises(error, match=text):
        Scheme.of(given)
