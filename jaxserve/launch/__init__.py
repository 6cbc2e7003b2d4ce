"""The composition root: the only place where checkpoint, text, decode, engine and server are put together.

``loading`` brings a model from its folder to readiness, ``serving`` puts it behind HTTP, the others use it at the
command line.
"""

from jaxserve.launch.bench import bench
from jaxserve.launch.checks import check
from jaxserve.launch.golden import goldens
from jaxserve.launch.loading import LoadedModel, load_model
from jaxserve.launch.planning import plan, where
from jaxserve.launch.serving import serve
from jaxserve.launch.writing import generate, score

__all__ = ["LoadedModel", "bench", "check", "generate", "goldens", "load_model", "plan", "score", "serve", "where"]
