"""What may stay on a device beside an engine, with the numbers of real devices and models."""

import pytest
from relax_train.backend.room import GIB, expected_room, reserve, room_beside, share_for

H200, H100, SMALL = 139 * GIB, 80 * GIB, 24 * GIB
KEPT = 14 * 4_022_468_096
"""Bytes of a 4 B model that trains alone on a device: bfloat16 weights, float32 master weights and two moments."""


def test_what_is_left_free_is_a_tenth_of_the_device_and_at_most_what_an_engine_can_come_to_need() -> None:
    assert [reserve(device) / GIB for device in (SMALL, H100, H200)] == [pytest.approx(2.4), 6, 6]
    chunk = 16_384 * 2 * (6 * 8192 + 2 * 28_672 // 8)  # of prompts, 70 B on eight devices, bfloat16
    logits = 3 * 512 * 151_936 * 4
    assert chunk + logits < reserve(H100) / 2


@pytest.mark.parametrize("device", [SMALL, H100, H200])
@pytest.mark.parametrize("resident", [0, 10 * GIB])
def test_what_stays_never_takes_what_is_left_free(device: int, resident: int) -> None:
    for free in range(0, device - resident, GIB):
        room = room_beside(free, resident, device)
        # What stays once it is obeyed, and what is free then.
        assert room == 0 or free + resident - room == reserve(device)
        assert room >= 0


@pytest.mark.parametrize(("share", "stays"), [(0.8, 15.8), (0.7, 29.7), (0.6, 43.6), (0.5, 57.5)])
def test_room_on_an_h200_by_the_engines_share(share: float, stays: float) -> None:
    assert expected_room(H200, share) / GIB == pytest.approx(stays, abs=0.01)


def test_the_share_beside_which_all_of_a_4b_model_stays() -> None:
    share = share_for(H200, KEPT)
    assert 0.53 < share < 0.54
    assert expected_room(H200, share) == pytest.approx(KEPT, abs=GIB // 1000)
    assert share_for(H100, KEPT) < 0.2
