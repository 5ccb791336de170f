"""Everything that touches Keras internals: abstract construction, the step's variables, creating and writing state.

Keras (JAX backend) already separates a model's state from its computation: ``model.train_step(state, data)`` is a pure
function of lists of arrays. This package supplies what planning needs around it:

* :mod:`.construction`: build a model without allocating its variables. Their initializers are kept, so that
* :mod:`.state` can create every variable already sharded, in one compiled program;
* :mod:`.inspection`: the variables behind the state, in order, and which parameter an optimizer variable belongs to;
* :mod:`.attributes`: what the step reads besides variables;
* :mod:`.trainer`: where the functions that ``fit``, ``evaluate`` and ``predict`` run are exchanged.

Nothing here imports Keras before it is called.
"""

from autoshard_ilp.keras_integration.attributes import attributes as attributes
from autoshard_ilp.keras_integration.attributes import same_attributes as same_attributes
from autoshard_ilp.keras_integration.construction import AbstractBuild as AbstractBuild
from autoshard_ilp.keras_integration.construction import abstract_construction as abstract_construction
from autoshard_ilp.keras_integration.construction import ensure_jax_backend as ensure_jax_backend
from autoshard_ilp.keras_integration.construction import no_distribution as no_distribution
from autoshard_ilp.keras_integration.construction import repeatable as repeatable
from autoshard_ilp.keras_integration.construction import seeded as seeded
from autoshard_ilp.keras_integration.construction import undisturbed as undisturbed
from autoshard_ilp.keras_integration.inspection import GROUPS as GROUPS
from autoshard_ilp.keras_integration.inspection import StateVariables as StateVariables
from autoshard_ilp.keras_integration.inspection import build_training_state as build_training_state
from autoshard_ilp.keras_integration.inspection import has_fixed_outputs as has_fixed_outputs
from autoshard_ilp.keras_integration.inspection import has_own_step as has_own_step
from autoshard_ilp.keras_integration.inspection import input_names as input_names
from autoshard_ilp.keras_integration.inspection import is_fully_built as is_fully_built
from autoshard_ilp.keras_integration.inspection import layers_without_jit as layers_without_jit
from autoshard_ilp.keras_integration.inspection import optimizer_parts as optimizer_parts
from autoshard_ilp.keras_integration.inspection import optimizer_slot_reference as optimizer_slot_reference
from autoshard_ilp.keras_integration.inspection import output_names as output_names
from autoshard_ilp.keras_integration.inspection import seed_variable_ids as seed_variable_ids
from autoshard_ilp.keras_integration.inspection import state_variables as state_variables
from autoshard_ilp.keras_integration.inspection import symbolic_inputs as symbolic_inputs
from autoshard_ilp.keras_integration.inspection import symbolic_outputs as symbolic_outputs
from autoshard_ilp.keras_integration.state import compiled_state as compiled_state
from autoshard_ilp.keras_integration.state import create_values as create_values
from autoshard_ilp.keras_integration.state import initial_state as initial_state
from autoshard_ilp.keras_integration.state import initial_values as initial_values
from autoshard_ilp.keras_integration.state import place as place
from autoshard_ilp.keras_integration.state import refuse_deleted as refuse_deleted
from autoshard_ilp.keras_integration.state import write_state as write_state
from autoshard_ilp.keras_integration.trainer import allow_training as allow_training
from autoshard_ilp.keras_integration.trainer import attach as attach
from autoshard_ilp.keras_integration.trainer import install as install
from autoshard_ilp.keras_integration.trainer import own_step as own_step
from autoshard_ilp.keras_integration.trainer import refuse_training as refuse_training
from autoshard_ilp.keras_integration.trainer import runs_eagerly as runs_eagerly
from autoshard_ilp.keras_integration.trainer import sync as sync
