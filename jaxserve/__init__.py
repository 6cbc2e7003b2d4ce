"""jaxserve: an LLM inference service in JAX.

The package itself holds only its version: each room is imported by its own name, so that ``jaxserve.config`` or
``jaxserve.text`` can be used without loading JAX.
"""

__version__ = "0.1.0"
