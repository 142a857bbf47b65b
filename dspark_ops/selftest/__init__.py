"""``python -m dspark_ops.selftest``: does verification keep the target's distribution, here, now?

Thousands of requests are drafted with ``gumbel_sample``, verified with ``rejection_sample`` and
extended by what was accepted, round after round, on toy vocabularies whose exact laws are known by
enumeration. What comes out is compared with those laws; a fault can be planted to see that the
comparison notices.

Source: DESIGN.md, sections 2 to 4; the laws are those of Leviathan 2023 (arXiv 2211.17192) and Sun
2024 (arXiv 2403.10444).
"""
