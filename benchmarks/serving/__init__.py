"""SGLang under load, with and without the plugin: `bash benchmarks/engine/run.sh online`."""

__all__: list[str] = []
