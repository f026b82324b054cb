"""The classes that users hold: handles on dense and sparse accumulators."""
