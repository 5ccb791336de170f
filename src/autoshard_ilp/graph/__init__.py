"""The graph of a step: from a jaxpr to operations and tensors, and the rewrites that keep what it computes.

:mod:`.model` is the graph itself; the other files make one (README.md says which does what).
"""

from autoshard_ilp.graph.model import BOUNDARY as BOUNDARY
from autoshard_ilp.graph.model import MIN_HUB_ELEMENTS as MIN_HUB_ELEMENTS
from autoshard_ilp.graph.model import PSEUDO_OPERATIONS as PSEUDO_OPERATIONS
from autoshard_ilp.graph.model import Graph as Graph
from autoshard_ilp.graph.model import Op as Op
from autoshard_ilp.graph.model import Region as Region
from autoshard_ilp.graph.model import Tensor as Tensor
from autoshard_ilp.graph.model import assemble as assemble
from autoshard_ilp.graph.model import changed as changed
from autoshard_ilp.graph.model import insert_hubs as insert_hubs
from autoshard_ilp.graph.model import is_batch as is_batch
from autoshard_ilp.graph.model import once_per_graph as once_per_graph
