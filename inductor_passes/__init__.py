"""torch.compile passes that find unfused draft-step code and rewrite it to ``dspark_ops``."""

from inductor_passes.backend import enabled, options, register
from inductor_passes.dry_run import explain
from inductor_passes.passes import DsparkPasses
from inductor_passes.sites import Report, Site, report

register()

__all__ = ["DsparkPasses", "Report", "Site", "enabled", "explain", "options", "report"]
