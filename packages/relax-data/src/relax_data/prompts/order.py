"""Orders that are the same on every machine and with every version of numpy."""

import numpy as np


def permutation(n: int, *key: int) -> np.ndarray:
    """A random order of ``range(n)``, int64 ``[n]``, that depends on ``n`` and ``key`` alone.

    It sorts raw PCG64 output: numpy promises that the bits of a generator stay the same for ever (NEP 19), but not
    what ``Generator.permutation`` makes of them.
    """
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)
    return np.argsort(np.asarray(bits), kind="stable").astype(np.int64)
