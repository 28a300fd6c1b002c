"""Policy and critic: loading, scoring, compiled kernels, adapters."""
