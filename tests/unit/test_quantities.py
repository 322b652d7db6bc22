"""Bytes and seconds as text: exact, strict, and clear about what is wrong."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect.byte_format import format_bytes
from recollect.errors import QuantityError
from recollect.quantities import check_budget, format_seconds, parse_budget, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected_bytes"),
    [
        (0, 0),
        (123, 123),
        (np.int64(123), 123),
        ("0", 0),
        ("1024", 1024),
        ("1_000", 1000),
        ("1e9", 10**9),
        ("7 B", 7),
        ("1KiB", 2**10),
        ("1MiB", 2**20),
        ("16GiB", 16 * 2**30),
        ("1TiB", 2**40),
        ("1PiB", 2**50),
        ("1KB", 10**3),
        ("1MB", 10**6),
        ("80GB", 80 * 10**9),
        ("1TB", 10**12),
        ("1PB", 10**15),
        (" 16 gib ", 16 * 2**30),
        ("1.5KiB", 1536),
        (".5KiB", 512),
        ("0.1GB", 10**8),  # exact, though 0.1 is no binary fraction
        ("0.3 B", 0),
        ("+2KB", 2000),
    ],
)
def test_parse_bytes(text: str | int, expected_bytes: int) -> None:
    parsed = parse_bytes(text)
    assert parsed == expected_bytes
    assert type(parsed) is int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "'': empty; write a whole number of bytes, or a text such as '16GiB'"),
        ("  ", "'  ': empty;"),
        ("-1", "'-1': negative;"),
        ("-1GiB", "'-1GiB': negative;"),
        (-5, "-5: negative;"),
        ("nan", "'nan': does not begin with a number, or has more than one suffix;"),
        ("inf", "'inf': does not begin with a number, or has more than one suffix;"),
        ("GiB", "'GiB': does not begin with a number, or has more than one suffix;"),
        ("16XB", "'16XB': unknown suffix 'XB';"),
        ("16 GiB per GPU", "'16 GiB per GPU': does not begin with a number, or has more than one suffix"),
        ("60%", "'60%': unknown suffix '%';"),
        ("16G", "'16G': 'G' could mean GiB (a power of 1024) or GB (a power of 1000); write which"),
        ("1.5", "'1.5': a fraction of a byte;"),
        ("1e31", "'1e31': the exponent is out of range;"),
        ("1e30GB", "'1e30GB': too large;"),
        ("9" * 65, "longer than 64 characters;"),
        (True, "True: a bool is not a number of bytes;"),
        (22.5, "22.5: a float is not a number of bytes; write '22.5GiB', or a whole number of bytes"),
        (16e9, "16000000000.0: a float is not a number of bytes; write a whole number of bytes"),
        (float("nan"), "nan: a float is not a number of bytes;"),
        (None, "None: a NoneType is not a number of bytes;"),
    ],
)
def test_parse_bytes_rejects(value: object, message: str) -> None:
    with pytest.raises(QuantityError, match=re.escape(message)) as caught:
        parse_bytes(value)  # type: ignore[arg-type]
    assert caught.value.value is value


@pytest.mark.parametrize(
    ("value", "expected_bytes"),
    [("60%", 600), ("62.5 %", 625), ("100%", 1000), ("0%", 0), ("33.33%", 333), ("150%", 1500), ("2KB", 2000), (7, 7)],
)
def test_parse_budget(value: str | int, expected_bytes: int) -> None:
    assert parse_budget(value, reference_bytes=1000) == expected_bytes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("%", "'%': empty; write a percentage such as '60%'"),
        ("-5%", "'-5%': negative;"),
        ("nan%", "'nan%': does not begin with a number"),
        ("60GiB%", "'60GiB%': 'GiB' before the percent sign is unknown; write a percentage such as '60%'"),
        ("sixty", "'sixty': does not begin with a number"),
        (
            "60",
            "'60': has no unit; write '60%' for that part of the peak without recompute, or an amount such as '60GiB'",
        ),
        (" 62.5 ", "has no unit; write '62.5%' for"),
        ("100", "has no unit; write '100%' for"),
        ("0.6", "'0.6': has no unit; write '60%' for"),
        (0.6, "0.6: has no unit; write '60%' for"),
        (1.5, "1.5: a float is not a number of bytes;"),
        ("101.5", "'101.5': a fraction of a byte;"),
        (False, "False: a bool is not a number of bytes;"),
    ],
)
def test_parse_budget_rejects(value: str | int, message: str) -> None:
    with pytest.raises(QuantityError, match=re.escape(message)):
        parse_budget(value, reference_bytes=1000)


@pytest.mark.parametrize("value", ["60", "6GXB", "60% of the cake", 0.6, None])
def test_check_budget_finds_what_parse_budget_would(value: Any) -> None:
    with pytest.raises(QuantityError) as expected:
        parse_budget(value, reference_bytes=1000, device_bytes=1000)
    with pytest.raises(QuantityError, match=re.escape(str(expected.value))):
        check_budget(value, device_bytes=1)


def test_check_budget_of_a_device() -> None:
    check_budget("90% of the device", device_bytes=1)
    with pytest.raises(QuantityError, match="the device's memory is known only for"):
        check_budget("90% of the device", device_bytes=None)
    check_budget("1024", device_bytes=None)


@pytest.mark.parametrize("value", [0, "0%", "-10%", 20, "20 B"])
def test_check_budget_refuses_what_is_a_mistake(value: Any) -> None:
    said = {0: "write a percentage such as '60%'", "0%": "no step fits into 0 bytes", "-10%": "negative; write"}
    with pytest.raises(QuantityError, match=f"{value}'?: .*{said.get(value, 'did you mean .20%. or .20GiB.[?]')}"):
        check_budget(value, device_bytes=None)
    check_budget(1, device_bytes=None)  # Asks for the least peak.


@pytest.mark.parametrize("value", ["90% of the device", "90 % of device", " 90.0%  of the  Device ", "90%of device"])
def test_parse_budget_of_the_device(value: str) -> None:
    assert parse_budget(value, reference_bytes=7, device_bytes=1000) == 900


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "90% of the device",
            "'90% of the device': the device's memory is known only for CUDA devices and the hardware of a fake profile. "
            "Give bytes, such as '16GiB'",
        ),
        ("60,5%", "'60,5%': has a comma; write '16000MB' for thousands, and '1.5GiB' for decimals"),
        ("90% of the cake", "'90% of the cake': unknown text after the percent sign; write a percentage"),
        ("90 of the device", "'90 of the device': does not begin with a number, or has more than one suffix"),
        ("x% of the device", "'x% of the device': does not begin with a number"),
        ("-1% of the device", "'-1% of the device': negative"),
    ],
)
def test_parse_budget_of_a_device_rejects(value: str, message: str) -> None:
    device_bytes = None if value.startswith("90%") else 1000
    with pytest.raises(QuantityError, match=re.escape(message)):
        parse_budget(value, reference_bytes=1000, device_bytes=device_bytes)


def test_parse_budget_without_a_peak() -> None:
    message = "'60%': a percentage of the peak without recompute, which differs from batch to batch; write bytes,"
    with pytest.raises(QuantityError, match=message):
        parse_budget("60%", reference_bytes=None)
    assert parse_budget("2KB", reference_bytes=None) == 2000
    assert parse_budget("90% of the device", reference_bytes=None, device_bytes=1000) == 900


def test_parse_budget_rejects_a_negative_reference() -> None:
    with pytest.raises(QuantityError, match="-1: negative"):
        parse_budget("60%", reference_bytes=-1)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),  # not 1024.0 KiB
        (2**20 - 100, "1023.9 KiB"),
        (16 * 2**30, "16.0 GiB"),
        (2**70, "1048576.0 PiB"),
        (-(3 * 2**20), "-3.0 MiB"),
    ],
)
def test_format_bytes(num_bytes: int, expected: str) -> None:
    assert format_bytes(num_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (5e-9, "5 ns"),
        (9.996e-4, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (9.996, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (-1.5, "-1.50 s"),
    ],
)
def test_format_seconds(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf")])
def test_format_seconds_rejects(seconds: float) -> None:
    with pytest.raises(QuantityError, match="not a finite number of seconds"):
        format_seconds(seconds)


@given(st.integers(min_value=0, max_value=2**60))
def test_formatted_bytes_parse_to_within_the_printed_digit(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    unit_bytes = parse_bytes("1 " + text.split()[1])
    assert abs(parse_bytes(text) - num_bytes) <= unit_bytes // 20 + 1


@given(st.text(max_size=20))
def test_any_text_is_a_number_of_bytes_or_an_error(text: str) -> None:
    try:
        assert parse_bytes(text) >= 0
    except QuantityError as error:
        assert error.value == text
