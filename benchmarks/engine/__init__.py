"""SGLang itself, with and without the plugin: `bash benchmarks/engine/run.sh`."""

__all__: list[str] = []
