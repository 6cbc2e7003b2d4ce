"""When tokens travel to the devices of their experts instead of to all devices: places, bytes, and from how many on.

Both ways give the same sums. To all: every device has every token, computes what its experts give, and the results are
summed over the devices. Exchanged: each device sends its share of the tokens to where their experts are, gets results
back, sums them, and hands what came out to all. It is arithmetic; nothing of it was measured on a mesh of accelerators.
"""

from __future__ import annotations

import math

# Places on a device for another's tokens, over the number of tokens that comes on average.
SPARE = 1.25
# Bytes of a number that is sent to an expert, and of one that comes back, summed in float32.
SENT, RETURNED = 2, 4
# Beginning to exchange takes as long as sending so many bytes: 10 us at 100 GB/s, which is about what links between
# devices of a host have. An exchange has three such beginnings (there, back, to all), a sum over devices one.
BEGINNING, MORE_BEGINNINGS = 1_000_000, 2


def places(tokens: int, chosen: int, devices: int) -> int:
    """Places that a device has for the tokens of another one, which has so many.

    A token is sent to a device once, however many of its experts are there; if it chose at random it would be sent
    there with probability ``1 - (1 - 1 / devices) ** chosen``.
    """
    return min(tokens, math.ceil(SPARE * tokens * _share(chosen, devices)))


def exchanged_from(width: int, chosen: int, devices: int) -> int | None:
    """Tokens of a pass from which on exchanging them takes less time; ``None`` if it never does.

    Summing over ``n`` devices sends ``2 (n-1)/n`` numbers for each there is. Exchanged, a token's numbers go to
    ``n-1`` devices with ``places``' probability, results come back, and ``(n-1)/n`` of what came out goes to all. Where
    a token has an expert on nearly every device there is nothing to save.

    Args:
        width: numbers of a token.
        chosen: experts that it takes.
        devices: among which the experts are split.
    """
    if devices == 1 or chosen == 0:
        return None
    others = (devices - 1) / devices
    summed = 2 * others * RETURNED
    sent = others * min(1.0, SPARE * _share(chosen, devices)) * (SENT + RETURNED) + others * SENT
    if sent >= summed:
        return None
    return math.ceil(MORE_BEGINNINGS * BEGINNING / (width * (summed - sent)))


def _share(chosen: int, devices: int) -> float:
    return 1 - (1 - 1 / devices) ** chosen
