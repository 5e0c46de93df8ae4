"""Does at its import what vLLM repeats at the start of each engine on CPUs, so that a fork server's forks have it."""

from functools import cache

import vllm.model_executor.layers.quantization.online.base  # noqa: F401 - imported by each engine's start
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging_if_needed
from vllm.platforms import current_platform

import goaly.generate.engine  # noqa: F401 - sets vLLM's environment

if current_platform.is_cpu():
    configure_logging_if_needed(LoggingConfig())
    register = cache(current_platform.register_triton_kernel_overrides)  # looks at all names of all modules
    register()
    current_platform.register_triton_kernel_overrides = register
