"""Pictures of what the engine did, drawn from real traces, each with text that says the same."""

from mie.viz.block_map import block_map
from mie.viz.figure import figure_frame
from mie.viz.file_map import Segment, file_map
from mie.viz.interactive import interactive
from mie.viz.kv_grid import Computed, kv_grid
from mie.viz.logit_lens import Reading, logit_lens
from mie.viz.pool_snapshot import Snapshot, snapshot
from mie.viz.prefix_tree import TreeSnapshot, prefix_tree, tree_snapshot
from mie.viz.stepper import Frame, Stepper
from mie.viz.timeline import timeline, timeline_figure

__all__ = [
    "Computed",
    "Frame",
    "Reading",
    "Segment",
    "Snapshot",
    "Stepper",
    "TreeSnapshot",
    "block_map",
    "figure_frame",
    "file_map",
    "interactive",
    "kv_grid",
    "logit_lens",
    "prefix_tree",
    "snapshot",
    "timeline",
    "timeline_figure",
    "tree_snapshot",
]
