"""Tolerances of the tests of ops, each with its reason. The rest is compared bit for bit."""

# Hash, fp32 uniforms, cache and greedy ids have no tolerance: integers, exact products by powers of
# two, one correctly rounded addition.

# Two fp32 logarithms of different libraries, each within about 2 ulp, or one contracted FMA.
NOISE32 = 4e-7
# The same with fp64 logarithms (2 ulp are 4.4e-16), the inner one's error magnified by the outer's
# slope where -log u is small.
NOISE64 = 1e-14
# An id may differ from the model's only if their noised values are this close, relative to the
# largest term: division and addition round too, within NOISE32 together.
ID32 = 4e-7
# Logits are divided in fp32 before they are upcast for fp64 noise; a GPU's `/` may be off by 2 ulp.
ID64 = 4e-7

# False-alarm rate of each statistical test: one in a million runs would fail for a right sampler.
# Draws are pure functions of fixed seeds, so a test that passes once passes always.
FALSE_ALARM = 1e-6


def noise_tolerance(use_fp64: bool) -> float:
    return NOISE64 if use_fp64 else NOISE32


def id_tolerance(use_fp64: bool) -> float:
    return ID64 if use_fp64 else ID32
