"""When a step counts as slower, and how what has become slower is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import pytest

from autopar.runtime import pulse
from autopar.runtime.pace import Pace, Slowdown
from autopar.runtime.pulse import Part, Readings


@dataclasses.dataclass(frozen=True)
class Device:
    """What of JAX's is asked."""

    process_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"


class Job:
    """Two processes that say the same."""

    hosts = ("node3", "node7")

    def combined(self, mine: str, combine: Any, subject: str) -> str:
        assert subject
        return str(combine([mine, mine]))


DEVICES: Any = [Device(0), Device(0), Device(1), Device(1)]
PARTS = [*(Part(what, i) for what in ("products", "memory") for i in range(4)), *(Part("link", i) for i in range(3))]


def pace(factors: Sequence[dict[Part, float]], job: Any = None, devices: Any = None) -> Pace:
    """One whose measurements are these times as slow as a thousandth of a second, one after the other."""
    measured = iter(factors)

    def measure(_: Any, __: Any) -> Readings:
        slow = next(measured)
        return {part: 1e-3 * slow.get(part, 1.0) for part in PARTS}

    return Pace("train", devices or DEVICES, 1.5, job, measure)


def told(of: Pace, *seconds: float) -> list[Slowdown | None]:
    return [of.look(100 + number, each) for number, each in enumerate(seconds)]


def test_a_step_is_slower_once_two_looks_have_found_it_so() -> None:
    slow = {Part("products", 2): 2.0, Part("products", 3): 2.2, Part("link", 1): 1.4}
    *before, found = told(pace([{}, slow], Job()), 0.14, 0.1, 0.2, 0.1, 0.14, 0.16, 0.18)
    assert before == [None] * 6 and found is not None
    assert (found.step, found.step_seconds, found.usual_seconds, found.is_first) == (106, 0.18, 0.1, False)
    assert found.parts == {Part("products", 2): pytest.approx(2.0), Part("products", 3): pytest.approx(2.2)}
    assert str(found) == (
        "train 106: a step takes 1.80 times as long as it did (180 ms instead of 100). Slower than before: products on "
        "devices 2, 3 (process 1 on node7), 2.2 times as slow."
    )


def test_links_within_a_process_and_between_two() -> None:
    slow = {Part("link", 0): 3.0, Part("link", 1): 4.0, Part("memory", 0): 1.5}
    found = told(pace([{}, slow], Job()), 0.1, 0.2, 0.2)[-1]
    assert "memory of device 0 (process 0 on node3), 1.5 times as slow" in str(found)
    assert "the way between devices 0 and 1 (process 0 on node3), 3.0 times as slow" in str(found)
    assert "the way between devices 1 and 2 (processes 0 on node3 and 1 on node7), 4.0 times as slow" in str(found)


def test_it_is_told_again_when_it_is_slower_still_or_was_well_in_between() -> None:
    of = pace([{}] * 5)
    looks = told(of, 0.1, 0.2, 0.2, 0.21, 0.29, 0.31, 0.2, 0.31, 0.31, 0.1, 0.2, 0.2)
    assert [number for number, look in enumerate(looks) if look is not None] == [2, 8, 11]
    assert "No device and no link between neighbours is slower than before" in str(looks[2])


def test_what_was_slow_at_the_first_look_is_known_as_it_is_without() -> None:
    slow = {Part("memory", 1): 3.0}
    virtual: Any = [Device(0, "cpu", "cpu") for _ in range(4)]
    *before, found = told(pace([slow, {}, slow], devices=virtual), 0.3, 0.1, 0.3, 0.3)
    assert before == [None] * 3 and found is not None and found.parts == {Part("memory", 1): pytest.approx(3.0)}


def test_looks_at_steps_that_took_no_time_are_none() -> None:
    assert told(pace([{}]), 0.0, 0.1, 0.0, 0.1, 0.0) == [None] * 5


def test_what_is_unlike_others_from_the_beginning_is_told_at_the_first_look() -> None:
    devices: Any = [Device(0) for _ in range(4)]
    (found,) = told(pace([{Part("memory", 1): 2.0}], devices=devices), 0.1)
    assert found is not None and found.is_first and found.parts == {Part("memory", 1): pytest.approx(2.0)}
    assert str(found).startswith("train 100: slower than others of its kind: memory of device 1 (process 0 on ")
    virtual: Any = [Device(0, "cpu", "cpu") for _ in range(4)]  # whose cores are the same
    assert told(pace([{Part("memory", 1): 2.0}], devices=virtual), 0.1) == [None]


def test_readings_of_devices_at_hand() -> None:
    devices = jax.devices()[:3]
    found = pulse.readings(devices, None)
    assert found.keys() == {
        *(Part(what, i) for what in ("products", "memory") for i in range(3)), Part("link", 0), Part("link", 1)
    }  # fmt: skip
    assert all(seconds > 0 for seconds in found.values())


def test_of_a_link_that_both_ends_have_read_the_quicker_reading_counts() -> None:
    texts = [pulse._written({Part("link", 0): 2.0, Part("memory", 0): 1.0}), pulse._written({Part("link", 0): 1.5})]
    assert pulse._read(pulse._merged(texts)) == {Part("link", 0): 1.5, Part("memory", 0): 1.0}
