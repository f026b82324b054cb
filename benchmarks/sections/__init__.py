"""The measurements, with one module for each section of the report."""
