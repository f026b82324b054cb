"""What OpenTelemetry gets to see: spans and metrics of operations, and the contexts that link them across processes."""
