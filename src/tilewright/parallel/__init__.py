"""Meshes of devices, and where the arrays of a model lie on them."""

from tilewright.parallel.mesh import MESH_AXES as MESH_AXES
from tilewright.parallel.mesh import MeshError as MeshError
from tilewright.parallel.mesh import make_mesh as make_mesh
from tilewright.parallel.pipeline import Pipeline as Pipeline
from tilewright.parallel.processes import join_processes as join_processes
from tilewright.parallel.rules import BATCH_AXES as BATCH_AXES
from tilewright.parallel.rules import TABLE as TABLE
from tilewright.parallel.rules import Rules as Rules
from tilewright.parallel.rules import validate_sharding as validate_sharding
