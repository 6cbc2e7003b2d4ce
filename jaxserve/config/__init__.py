"""Every setting of jaxserve: one frozen tree, from which files, environment, flags and the documents are derived.

``tree`` says which settings there are, ``layers`` where their values come from. Neither knows a model, a device or a
server.
"""

from jaxserve.config.layers import Given, Loaded, describe, load, tuned_environment
from jaxserve.config.tree import (
    SETTINGS,
    AuditConfig,
    AuthConfig,
    CheckpointsConfig,
    Config,
    EngineConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    Pool,
    ServerConfig,
    Setting,
    TLSConfig,
    config_table,
    written,
)

__all__ = [
    "SETTINGS",
    "AuditConfig",
    "AuthConfig",
    "CheckpointsConfig",
    "Config",
    "EngineConfig",
    "Given",
    "Loaded",
    "LogConfig",
    "MeshConfig",
    "ModelConfig",
    "Pool",
    "ServerConfig",
    "Setting",
    "TLSConfig",
    "config_table",
    "describe",
    "load",
    "tuned_environment",
    "written",
]
